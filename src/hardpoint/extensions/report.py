"""Boot one role in a process of its own and write what happened, line by line, as JSON.

    python -m hardpoint.extensions.report front_end --out FILE [--groups ...] [--choose ...] [--serve ...] [...]

Each ledger entry is written as it is made, so that a plugin that hangs or ends the process can
be named from what is in the file by then. The last line is the outcome.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from hardpoint import log
from hardpoint.errors import HardpointError
from hardpoint.extensions.boot import boot, report_unused_settings
from hardpoint.extensions.chosen import check_choice
from hardpoint.extensions.faults import in_words
from hardpoint.extensions.groups import (
    load_endpoint_plugins,
    load_io_processors,
    load_logits_processors,
    load_request_hooks,
    load_stat_logger_plugin_factories,
)
from hardpoint.extensions.ledger import LedgerEntry, ledger
from hardpoint.extensions.patches import patches
from hardpoint.extensions.points import config_hook_row, group_row
from hardpoint.extensions.refs import load_ref
from hardpoint.extensions.rows import Role

# What a front end of a text-generation server, and a worker, would load after their boot.
_LATER: dict[str, Callable[[], Any]] = {
    "stat_loggers": load_stat_logger_plugin_factories,
    "logits_processors": load_logits_processors,
    "request_hooks": load_request_hooks,
    "endpoints": lambda: load_endpoint_plugins(("generate",)),
    "io_processors": load_io_processors,
}
ROLES = ("front_end", "engine_core", "worker", "inspector")
_INSPECT_ALL = "hardpoint.worker.models.registry:inspect_all"
_BUILD = "hardpoint.worker.loaders.building:build_without_weights"


@dataclass(slots=True)
class BootReport:
    """The outcome of one boot.

    status   exit status of the process; None when it did not end in time
    entries  its ledger
    begun    (key, name, what) of the import or call that was running when it ended, or None
    stops    the errors that stopped it, as dicts with type, code, what, origin, fix
    output   its log
    """

    role: str
    status: int | None = None
    entries: list[LedgerEntry] = field(default_factory=list)
    begun: tuple[str, str, str] | None = None
    stops: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False
    seconds: float = 0.0
    output: str = ""

    def find(self, kind: str, name: str = "", key: str = "") -> list[LedgerEntry]:
        """Ledger entries of a kind, narrowed by name and row key."""
        return [
            entry
            for entry in self.entries
            if entry.kind == kind and (not name or entry.name == name) and (not key or entry.key == key)
        ]


def boot_in_child(
    role: str,
    environment: Mapping[str, str] | None = None,
    groups: Sequence[str] | None = None,
    choices: Mapping[str, str] | None = None,
    serve_flags: Sequence[str] | None = None,
    timeout_s: float = 60.0,
    look_at_models: bool = False,
) -> BootReport:
    """Boot `role`, one of ROLES, in a new process as a server would, and report.

    environment  of the new process; this one's unless given
    groups       the groups to load after the boot; all that belong to the role unless given
    choices      config hook key to value, each checked after the boot
    serve_flags  flags of `serve`, from which a front end makes its configuration; none is made unless given
    look_at_models  an inspector imports every model class that plugins registered, and a worker builds the model of
                    `serve_flags`, without its weights
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.jsonl"
        command = [sys.executable, "-m", "hardpoint.extensions.report", role, "--out", str(out)]
        if groups is not None:
            command += ["--groups", ",".join(groups)]
        command += [f"--choose={key}={value}" for key, value in (choices or {}).items()]
        command += [f"--serve={json.dumps(list(serve_flags))}"] if serve_flags is not None else []
        command += ["--look-at-models"] if look_at_models else []
        status, output = _run(command, environment, timeout_s)
        text = out.read_text(encoding="utf-8") if out.exists() else ""
    report = BootReport(role, status, output=output)
    _read(text, report)
    return report


def _run(command: list[str], environment: Mapping[str, str] | None, timeout_s: float) -> tuple[int | None, str]:
    try:
        done = subprocess.run(
            command,
            env=dict(os.environ if environment is None else environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        return None, output.decode(errors="replace") if isinstance(output, bytes) else output
    return done.returncode, done.stdout


def _read(text: str, report: BootReport) -> None:
    for line in text.splitlines():
        try:
            data = json.loads(line)
        except ValueError:
            continue  # the process ended in the middle of a line
        if "entry" in data:
            entry = LedgerEntry.from_dict(data["entry"])
            if entry.kind == "begin":
                report.begun = (entry.key, entry.name, entry.detail)
            else:
                report.entries.append(entry)
        if "outcome" in data:
            report.finished, report.begun = True, None
            report.stops, report.seconds = data["outcome"]["stops"], data["outcome"]["seconds"]


def write_report(
    role: Role,
    groups: Sequence[str],
    choices: Mapping[str, str],
    out: TextIO,
    serve_flags: list[str] | None = None,
    look_at_models: bool = False,
) -> int:
    """Boot and load, writing to `out`; 0 when nothing stopped, 1 otherwise. Arguments as `boot_in_child`."""

    def write(data: dict[str, Any]) -> None:
        print(json.dumps(data, default=str), file=out, flush=True)

    stop_listening = ledger.listen(lambda entry: write({"entry": entry.to_dict()}))
    started = time.perf_counter()
    stops: list[dict[str, str]] = []
    if serve_flags:
        load_ref("hardpoint.config.early_flags:apply_early_flags")(serve_flags)
    steps: list[Callable[[], Any]] = [partial(boot, role), *(_LATER[key] for key in groups)]
    steps += [partial(check_choice, key, value) for key, value in choices.items()]
    if serve_flags is not None and role is Role.FRONT_END:
        steps.append(partial(_make_config, serve_flags))
    if look_at_models and role is Role.INSPECTOR:
        steps.append(load_ref(_INSPECT_ALL))
    if look_at_models and serve_flags and role is Role.WORKER:
        steps.append(lambda: load_ref(_BUILD)(_make_config(serve_flags)))
    for step in steps:
        try:
            step()
        except (Exception, SystemExit) as error:
            stops.append(_as_dict(error))
            if step is steps[0]:
                break  # without its boot the process would not get further
    if role is Role.FRONT_END and not stops:
        report_unused_settings(final=True)
    patches.look()
    stop_listening()
    write({"outcome": {"role": role.label, "seconds": time.perf_counter() - started, "stops": stops}})
    return 1 if stops else 0


def _make_config(serve_flags: list[str]) -> Any:
    arguments = load_ref("hardpoint.config.engine_args:AsyncEngineArgs")
    parser = load_ref("hardpoint.config.arguments:FlexibleArgumentParser")(prog="hardpoint serve")
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS)
    load_ref("hardpoint.config.engine_args:add_front_end_args")(parser)
    arguments.add_cli_args(parser)
    return arguments.from_cli_args(parser.parse_args(serve_flags)).create_engine_config("server")


def _as_dict(error: BaseException) -> dict[str, str]:
    parts = {"type": type(error).__name__, "code": "error", "what": in_words(error), "origin": "", "fix": ""}
    if isinstance(error, HardpointError):
        parts.update(code=error.code, what=error.what, origin=error.origin, fix=error.fix)
    return parts


def groups_of(role: Role) -> list[str]:
    """Keys of the groups that load after the boot of a role, in the order a server loads them."""
    return [key for key in _LATER if role in group_row(key).roles]


def main(argv: list[str] | None = None) -> int:
    """Command line of the module."""
    parser = argparse.ArgumentParser(prog="hardpoint.extensions.report")
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--out", required=True)
    parser.add_argument("--groups", default=None)
    parser.add_argument("--choose", action="append", default=[])
    parser.add_argument("--serve", type=json.loads, default=None)
    parser.add_argument("--look-at-models", action="store_true")
    args = parser.parse_args(argv)
    role = Role[args.role.upper()]
    log.configure(role.label)
    groups = groups_of(role) if args.groups is None else [key for key in args.groups.split(",") if key]
    pairs = (choice.partition("=")[::2] for choice in args.choose)
    choices = {key: value for key, value in pairs if role in config_hook_row(key).roles}
    with open(args.out, "a", encoding="utf-8") as out:
        return write_report(role, groups, choices, out, args.serve, args.look_at_models)


if __name__ == "__main__":
    sys.exit(main())
