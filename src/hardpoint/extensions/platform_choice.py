"""Choose the platform of this process: ask every detector once, apply the platform row's fault rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hardpoint.env import envs
from hardpoint.errors import PluginError, StartError
from hardpoint.extensions.discovery import Allowlist, Found, catalogue
from hardpoint.extensions.faults import PluginRuntimeError, in_words
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.loading import Loaded, call, fault, load_group, logger, remember_owner, wrong_kind
from hardpoint.extensions.points import group_row
from hardpoint.extensions.refs import resolve_obj_by_qualname

Detector = Callable[[], str | None]
UNSPECIFIED = "hardpoint.contracts.platform.UnspecifiedPlatform"


@dataclass(frozen=True, slots=True)
class _Active:
    found: Found
    path: str


def load_platform_detectors() -> list[Loaded]:
    """Import the platform plugins that may load; each value is a detector."""
    return load_group(group_row("platforms"))


def resolve_platform_cls_qualname(builtin_detectors: Mapping[str, Detector], unspecified: str = UNSPECIFIED) -> str:
    """The class path `pkg.module.Class` of the platform to use.

    builtin_detectors  name to a function giving a class path or None, in order of preference

    One active plugin wins over every built-in platform. Raises PluginError for a plugin's fault
    that stops, a PluginRuntimeError (a RuntimeError) when several are active.
    """
    if envs.VLLM_TARGET_DEVICE.lower() == "cpu":
        return _forced_cpu(builtin_detectors)
    failed: list[tuple[Found, BaseException]] = []
    active = _probe_plugins(failed)
    path = _the_plugin(active) if active else _the_builtin(builtin_detectors, unspecified)
    _report_failed(failed, path)
    return path


def _forced_cpu(builtin_detectors: Mapping[str, Detector]) -> str:
    row = group_row("platforms")
    bypassed = [found for found in catalogue.group(row.group) if not Allowlist.read().refusal(row, found.name)]
    for found in bypassed:
        why = "VLLM_TARGET_DEVICE is cpu"
        ledger.record("skip", row.key, found.name, origin=found.origin, detail=why)
    if bypassed:
        names = ", ".join(f"{found.name} ({found.package})" for found in bypassed)
        logger.warning("VLLM_TARGET_DEVICE is cpu, so the installed platform plugins are not asked: %s", names)
    path = builtin_detectors["cpu"]()
    if path is None:
        raise StartError(
            "VLLM_TARGET_DEVICE is cpu, but the CPU platform is not available", code="platform-none", fix="unset it"
        )
    logger.debug("platform: %s, asked for by VLLM_TARGET_DEVICE", path)
    return path


def _probe_plugins(failed: list[tuple[Found, BaseException]]) -> list[_Active]:
    row = group_row("platforms")
    active = []
    for loaded in load_platform_detectors():
        found = loaded.found
        try:
            path = call(row, loaded)
        except (Exception, SystemExit) as error:
            # Skipped and told once the platform used instead is known, unless it was asked for by name.
            failed.append((found, error))
            if Allowlist.read().names_it(found.name):
                _report_failed(failed, "")
            continue
        if path is None:
            ledger.record(
                "skip", row.key, found.name, origin=found.origin, detail="its detector says it does not apply"
            )
        elif not isinstance(path, str):
            what = f"platform plugin {found.name!r} gave {type(path).__name__} {path!r}, not a class path"
            fault(row, found, row.wrong_type, what, wrong_kind(row, found, what), code="plugin-kind")
        else:
            active.append(_Active(found, path))
    return active


def _report_failed(failed: list[tuple[Found, BaseException]], instead: str) -> None:
    row = group_row("platforms")
    while failed:
        found, error = failed.pop(0)
        used = f"; {instead} is used instead" if instead else ""
        what = f"platform plugin {found.name!r}: its detector failed: {in_words(error)}{used}"
        fault(row, found, row.call_fails, what, error, code="plugin-call")


def _the_plugin(active: list[_Active]) -> str:
    row = group_row("platforms")
    if len(active) > 1:
        listed = " and ".join(f"{one.found.name} ({one.found.package})" for one in active)
        raise PluginRuntimeError(
            f"only one platform plugin can be activated, and {len(active)} say they apply: {listed}",
            code="platform-two",
            origin=row.group,
            fix="uninstall one, or leave it out with VLLM_PLUGINS or HARDPOINT_PLUGINS_DENY",
        )
    found, path = active[0].found, active[0].path
    try:
        value = resolve_obj_by_qualname(path)
    except Exception as error:
        what = f"platform plugin {found.name!r} gave {path!r}, which cannot be imported: {in_words(error)}"
        fix = f"mend or uninstall {found.package}"
        ledger.record("fault", row.key, found.name, origin=found.origin, detail=what, fix=fix)
        origin = f"{found.origin.label}, in {ledger.role}"
        raise PluginError(what, code="plugin-import", origin=origin, fix=fix) from error
    remember_owner(value, found)
    ledger.record("override", row.key, found.name, origin=found.origin_with_file(), detail=f"platform {path}")
    logger.info("platform plugin %r (%s) is activated: %s", found.name, found.package, path)
    return path


def _the_builtin(builtin_detectors: Mapping[str, Detector], unspecified: str) -> str:
    active = {}
    for name, detector in builtin_detectors.items():
        try:
            path = detector()
        except Exception:
            logger.debug("platform %s: its detector failed", name, exc_info=True)
            continue
        if path is not None:
            active[name] = path
    if len(active) > 1:
        raise StartError(
            f"only one platform can be activated, and several built-in ones apply: {', '.join(active)}",
            code="platform-two",
            fix="set VLLM_TARGET_DEVICE",
        )
    path = next(iter(active.values()), unspecified)
    logger.debug("platform: %s%s", path, "" if active else ", none was detected")
    return path
