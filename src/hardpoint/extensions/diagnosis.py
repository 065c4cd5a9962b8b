"""Read the boot reports of all roles and say what is wrong, each thing once, with its fix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hardpoint.extensions.ledger import BUILT_IN, LedgerEntry
from hardpoint.extensions.loading import IMPORTS, SLOW_S
from hardpoint.extensions.points import REGISTRIES, registry_row
from hardpoint.extensions.report import BootReport
from hardpoint.extensions.rows import Role, State

_ORDER = ("error", "warning", "note")
_REGISTRIES = frozenset(row.key for row in REGISTRIES)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One finding: severity `error`, `warning` or `note`, in these roles."""

    severity: str
    what: str
    fix: str
    roles: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def diagnose(reports: Iterable[BootReport], timeout_s: float) -> list[Diagnosis]:
    """All findings, worst first; the same finding in several roles is one."""
    roles: dict[tuple[str, str, str], list[str]] = {}
    for report in reports:
        for finding in _findings(report, timeout_s):
            seen = roles.setdefault(finding, [])
            if report.role not in seen:
                seen.append(report.role)
    all_found = [Diagnosis(severity, what, fix, tuple(where)) for (severity, what, fix), where in roles.items()]
    return sorted(all_found, key=lambda one: _ORDER.index(one.severity))


def _findings(report: BootReport, timeout_s: float) -> Iterator[tuple[str, str, str]]:
    told = set()
    for entry in report.entries:
        finding = _from_entry(entry)
        if finding is not None:
            told.add(entry.detail)
            yield finding
    for stop in report.stops:
        if stop["code"] != "plugin-strict" and not any(text in stop["what"] for text in told):
            yield "error", stop["what"], stop["fix"] or "see the log"
    if not report.finished:
        yield _unfinished(report, timeout_s)


def _unfinished(report: BootReport, timeout_s: float) -> tuple[str, str, str]:
    key, name, doing = report.begun or ("", "", "boot")
    who = f"the {doing} of {key} plugin {name!r}" if name else "the boot"
    ended = f"does not end within {timeout_s:g} s" if report.status is None else "ends the process"
    last = "" if report.status is None else f" (status {report.status})"
    return "error", f"{who} {ended}{last}", f"mend or uninstall the plugin, or set HARDPOINT_PLUGINS_DENY={name}"


def _from_entry(entry: LedgerEntry) -> tuple[str, str, str] | None:
    who = f"{entry.key} plugin {entry.name!r}"
    owner = entry.origin.label if entry.origin is not None else "code outside a plugin"
    # Of the other faults and warnings, the text names the plugin.
    by = f" [from {owner}]" if entry.key in _REGISTRIES and owner != BUILT_IN.label else ""
    if entry.kind == "fault":
        return "error", f"{entry.detail}{by}", entry.fix or "mend or uninstall the plugin"
    if entry.kind == "warn" and not _is_planned(entry.key):
        return "warning", f"{entry.detail}{by}", entry.fix or "see the documentation of this extension point"
    if entry.kind == "warn":
        return "note", entry.detail, "do not select it"
    if entry.kind == "replace":
        return "warning", f"{entry.key} {entry.name!r}: {entry.detail} [from {owner}]", "leave out one of the two"
    if entry.kind in ("load", "call"):
        return _from_run(entry, who)
    if entry.kind == "skip" and entry.key in _REGISTRIES:
        return "note", f"{entry.key} entry {entry.name!r}: {entry.detail}{by}", entry.fix or "nothing"
    if entry.kind == "skip" and "VLLM_PLUGINS" in entry.detail:
        return "note", f"{who} is left out: {entry.detail}", f"add {entry.name} to VLLM_PLUGINS if you want it"
    if entry.kind == "skip":
        return "note", f"{who} is left out: {entry.detail}", "nothing, if that is what you want"
    return None


def _from_run(entry: LedgerEntry, who: str) -> tuple[str, str, str] | None:
    doing = "import" if entry.kind == "load" else "call"
    heavy = entry.detail.rpartition(IMPORTS)[2] if IMPORTS in entry.detail else ""
    if (entry.duration_s or 0.0) > SLOW_S:
        cause = f" (it imports {heavy})" if heavy else ""
        # Rounded to whole seconds, so that the roles' times make one finding.
        text = f"the {doing} of {who} takes {max(1, round(entry.duration_s or 0.0))} s in each process{cause}"
        return "warning", text, "import heavy modules only where they are used, register by 'module:Class'"
    if heavy and entry.role == Role.FRONT_END.label:
        text = f"the {doing} of {who} brings {heavy} into the front end, which does without"
        return "note", text, f"import {heavy} inside the functions that need it, register by 'module:Class'"
    return None


def _is_planned(key: str) -> bool:
    try:
        return registry_row(key).state is State.PLANNED
    except KeyError:
        return False
