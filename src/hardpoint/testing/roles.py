"""Boot a role in a process of its own and look at what happened."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hardpoint.extensions.ledger import LedgerEntry
from hardpoint.extensions.report import read_report


@dataclass(slots=True)
class BootReport:
    """The outcome of one boot.

    status   exit status of the process; None when it did not end in time
    entries  its ledger
    stops    the errors that stopped it, as dicts with type, code, what, origin, fix
    output   its log
    """

    role: str
    status: int | None
    entries: list[LedgerEntry] = field(default_factory=list)
    stops: list[dict[str, Any]] = field(default_factory=list)
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
    timeout_s: float = 60.0,
) -> BootReport:
    """Boot `role` (`front_end`, `engine_core`, `worker`, `inspector`) as a server would.

    groups  the groups to load after the boot; all that belong to the role unless given
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.jsonl"
        command = [sys.executable, "-m", "hardpoint.extensions.report", role, "--out", str(out)]
        if groups is not None:
            command += ["--groups", ",".join(groups)]
        status, output = _run(command, environment, timeout_s)
        text = out.read_text(encoding="utf-8") if out.exists() else ""
    entries, outcome = read_report(text)
    return BootReport(role, status, entries, (outcome or {}).get("stops", []), output)


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
