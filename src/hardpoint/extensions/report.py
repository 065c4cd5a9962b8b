"""Boot one role in a process of its own and write what happened, line by line, as JSON.

    python -m hardpoint.extensions.report front_end --out FILE [--groups stat_loggers,...]

Each ledger entry is written as it is made, so that a plugin that hangs or ends the process can
be named from what is in the file by then. The last line is the outcome.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from hardpoint import log
from hardpoint.errors import HardpointError
from hardpoint.extensions.boot import boot
from hardpoint.extensions.faults import in_words
from hardpoint.extensions.groups import (
    load_endpoint_plugins,
    load_io_processors,
    load_logits_processors,
    load_stat_logger_plugin_factories,
)
from hardpoint.extensions.ledger import LedgerEntry, ledger
from hardpoint.extensions.points import GROUPS
from hardpoint.extensions.rows import Role

# What a front end of a text-generation server would load after its boot.
_LATER: dict[str, Callable[[], Any]] = {
    "stat_loggers": load_stat_logger_plugin_factories,
    "logits_processors": load_logits_processors,
    "endpoints": lambda: load_endpoint_plugins(("generate",)),
    "io_processors": load_io_processors,
}


def role_named(name: str) -> Role:
    """The role with this label, such as `worker`."""
    return Role[name.upper()]


def groups_of(role: Role) -> list[str]:
    """Keys of the groups that load after the boot of a role."""
    return [row.key for row in GROUPS if row.key in _LATER and role in row.roles]


def report(role: Role, groups: list[str], out: TextIO) -> int:
    """Boot and load, writing to `out`; 0 when nothing stopped, 1 otherwise."""

    def write(data: dict[str, Any]) -> None:
        print(json.dumps(data, default=str), file=out, flush=True)

    ledger.listen(lambda entry: write({"entry": entry.to_dict()}))
    started = time.perf_counter()
    stops = []
    for step in [lambda: boot(role), *(_LATER[key] for key in groups)]:
        try:
            step()
        except (Exception, SystemExit) as error:
            stops.append(_as_dict(error))
            break
    write({"outcome": {"role": role.label, "seconds": time.perf_counter() - started, "stops": stops}})
    return 1 if stops else 0


def _as_dict(error: BaseException) -> dict[str, str]:
    if isinstance(error, HardpointError):
        return {
            "type": type(error).__name__,
            "code": error.code,
            "what": error.what,
            "origin": error.origin,
            "fix": error.fix,
        }
    return {"type": type(error).__name__, "code": "error", "what": in_words(error), "origin": "", "fix": ""}


def read_report(text: str) -> tuple[list[LedgerEntry], dict[str, Any] | None]:
    """The ledger entries and the outcome in what `report` wrote; None when it did not get to the end."""
    entries: list[LedgerEntry] = []
    outcome = None
    for line in text.splitlines():
        try:
            data = json.loads(line)
        except ValueError:
            continue  # the process ended in the middle of a line
        if "entry" in data:
            entries.append(LedgerEntry.from_dict(data["entry"]))
        outcome = data.get("outcome", outcome)
    return entries, outcome


def main(argv: list[str] | None = None) -> int:
    """Command line of the module."""
    parser = argparse.ArgumentParser(prog="hardpoint.extensions.report")
    parser.add_argument("role", choices=[role.label for role in Role])
    parser.add_argument("--out", required=True)
    parser.add_argument("--groups", default=None)
    args = parser.parse_args(argv)
    role = role_named(args.role)
    log.configure(role.label)
    groups = groups_of(role) if args.groups is None else [key for key in args.groups.split(",") if key]
    with open(args.out, "a", encoding="utf-8") as out:
        return report(role, groups, out)


if __name__ == "__main__":
    sys.exit(main())
