"""What happened to extensions in this process: who loaded, registered, replaced or wrote what, when, from where.

One ledger per process. `export` gives its entries as plain dicts for a message; `merge` takes
those of another process, so that the front end can answer for all of them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any

KIND_MEANINGS = {
    "discover": "an installed entry point was found",
    "skip": "an entry point was left out, or a registration found no use, and why",
    "load": "an entry point was imported, and how long that took",
    "call": "its function was called, or its object was built",
    "register": "a registry got an entry",
    "replace": "a registry entry took the place of another one",
    "unregister": "a registry lost an entry",
    "rollback": "a registration was undone because its plugin failed",
    "config_write": "a config field was written",
    "override": "a built-in part gave way to an extension, or a patch was applied",
    "inspect": "a model class was asked what it declares, or the answer was remembered",
    "fault": "an extension failed",
    "warn": "something deserves attention",
}
KINDS = tuple(KIND_MEANINGS)
_LIMIT = 20_000


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an extension comes from.

    distribution, version   the installed package, empty for code outside one
    group, entry_point      the entry point being loaded, empty outside of loading
    module, file            where the code is
    """

    distribution: str = ""
    version: str = ""
    group: str = ""
    entry_point: str = ""
    module: str = ""
    file: str = ""

    @property
    def label(self) -> str:
        """One phrase for messages, such as `acme-store 1.2, vllm.general_plugins: acme`."""
        package = f"{self.distribution} {self.version}".strip() or (f"module {self.module}" if self.module else "")
        if self.distribution == "hardpoint":
            package = "built in"
        point = f"{self.group}: {self.entry_point}" if self.entry_point else ""
        return ", ".join(part for part in (package, point) if part) or "code outside a plugin"


BUILT_IN = Origin(distribution="hardpoint")


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One event. `time` is seconds since the epoch; (pid, seq) is unique within one run of a server on one machine."""

    seq: int
    time: float
    pid: int
    role: str
    kind: str
    key: str
    name: str
    origin: Origin | None = None
    duration_s: float | None = None
    detail: str = ""
    fix: str = ""

    @property
    def identity(self) -> tuple[int, int, float]:
        """What tells it from all others, also from those of a process with the same pid on another machine."""
        return (self.pid, self.seq, self.time)

    def to_dict(self) -> dict[str, Any]:
        """As plain data for a message or JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LedgerEntry:
        """The inverse of `to_dict`; unknown fields are ignored."""
        known = {name: data[name] for name in cls.__slots__ if name in data}
        origin = known.get("origin")
        known["origin"] = Origin(**{n: origin[n] for n in Origin.__slots__ if n in origin}) if origin else None
        return cls(**known)


class Ledger:
    """An append-only list of entries with a bound; what is past the bound is counted, not kept."""

    def __init__(self) -> None:
        self._entries: list[LedgerEntry] = []
        self._seen: set[tuple[int, int, float]] = set()
        self._roots: dict[str, Origin] = {}
        self._listeners: list[Callable[[LedgerEntry], None]] = []
        self._lock = threading.RLock()
        self._next_seq = 0
        self.dropped = 0
        self.role = "main"
        # Called before the entries leave this process, to add what nobody reported.
        self.before_export: Callable[[], None] = lambda: None

    def record(
        self,
        kind: str,
        key: str,
        name: str = "",
        *,
        origin: Origin | None = None,
        duration_s: float | None = None,
        detail: str = "",
        fix: str = "",
    ) -> LedgerEntry:
        """Append one event of this process; `origin` defaults to whoever is running now."""
        assert kind in KINDS, kind
        who = origin if origin is not None else current_origin()
        with self._lock:
            entry = LedgerEntry(
                self._next_seq, time.time(), os.getpid(), self.role, kind, key, name, who, duration_s, detail, fix
            )
            self._next_seq += 1
            self._append(entry)
        self._tell(entry)
        return entry

    def announce(self, key: str, name: str, origin: Origin, detail: str) -> None:
        """Tell the listeners that something begins; kept nowhere, as its end will be recorded."""
        self._tell(LedgerEntry(-1, time.time(), os.getpid(), self.role, "begin", key, name, origin, None, detail))

    def _tell(self, entry: LedgerEntry) -> None:
        for listener in self._listeners:
            listener(entry)

    def _append(self, entry: LedgerEntry) -> None:
        if len(self._entries) >= _LIMIT:
            self.dropped += 1
            return
        self._entries.append(entry)
        self._seen.add(entry.identity)

    def entries(self, *, kind: str = "", key: str = "", name: str = "", pid: int = 0) -> list[LedgerEntry]:
        """Entries in order, of all processes merged so far, narrowed by what is given."""
        with self._lock:
            return [
                entry
                for entry in self._entries
                if (not kind or entry.kind == kind)
                and (not key or entry.key == key)
                and (not name or entry.name == name)
                and (not pid or entry.pid == pid)
            ]

    def why(self, key: str, name: str) -> list[LedgerEntry]:
        """Everything known about one entry of one row, oldest first, over all processes."""
        return sorted(self.entries(key=key, name=name), key=lambda entry: (entry.time, entry.pid, entry.seq))

    def export(self) -> list[dict[str, Any]]:
        """This process's own entries as plain dicts."""
        self.before_export()
        return [entry.to_dict() for entry in self.entries(pid=os.getpid())]

    def merge(self, exported: Iterable[Mapping[str, Any]]) -> None:
        """Add the entries of another process; those already here are left alone."""
        with self._lock:
            for data in exported:
                entry = LedgerEntry.from_dict(data)
                if entry.identity not in self._seen:
                    self._append(entry)

    def listen(self, listener: Callable[[LedgerEntry], None]) -> Callable[[], None]:
        """Call `listener` for each new entry of this process; the result stops that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def know_package(self, root: str, origin: Origin) -> None:
        """Remember which plugin the top-level package `root` belongs to."""
        self._roots[root] = origin

    def origin_of_module(self, module_name: str) -> Origin | None:
        """The plugin that owns a module, if one of the loaded plugins does."""
        return self._roots.get(module_name.partition(".")[0])

    def clear(self) -> None:
        """Forget everything (tests)."""
        with self._lock:
            self._entries.clear()
            self._seen.clear()
            self._roots.clear()
            self.dropped = 0


ledger = Ledger()

_current: ContextVar[Origin | None] = ContextVar("hardpoint_origin", default=None)


@contextmanager
def attributing(origin: Origin) -> Iterator[None]:
    """Attribute what happens inside the block to `origin`."""
    token = _current.set(origin)
    try:
        yield
    finally:
        _current.reset(token)


def current_origin() -> Origin:
    """Who is acting: the plugin being loaded or called, else the owner of the calling module."""
    explicit = _current.get()
    return explicit if explicit is not None else _caller_origin()


def acting_plugin() -> Origin | None:
    """The loaded plugin whose code is on the call stack, nearest first; None when there is none.

    Finds the author of what a patch does, long after its plugin was loaded.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = ledger.origin_of_module(frame.f_globals.get("__name__", ""))
        if owner is not None:
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def plugin_behind(error: BaseException) -> Origin | None:
    """The loaded plugin whose code raised, itself or in a library it called; None when code of ours did."""
    found, trace = None, error.__traceback__
    while trace is not None:
        module_name = trace.tb_frame.f_globals.get("__name__", "")
        ours = module_name.partition(".")[0] == "hardpoint"
        found = None if ours else ledger.origin_of_module(module_name) or found
        trace = trace.tb_next
    return found


def plugin_place(error: BaseException, importing: str = "") -> str:
    """`file:line` of the last line of a plugin that led to the error; "" when none did.

    importing  a module of the plugin, where it is not known as such yet
    """
    place, trace = "", error.__traceback__
    package = importing.partition(".")[0]
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__", "")
        if (package and module.partition(".")[0] == package) or ledger.origin_of_module(module) is not None:
            place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _caller_origin() -> Origin:
    frame = sys._getframe(2)
    while frame is not None:
        module_name = _module_of(frame.f_globals)
        owner = ledger.origin_of_module(module_name)
        if owner is not None:
            return owner
        if module_name.startswith(_OWN_DOORS):
            return BUILT_IN
        if module_name.partition(".")[0] not in _TRANSPARENT:
            return Origin(module=module_name, file=frame.f_globals.get("__file__") or "")
        frame = frame.f_back  # type: ignore[assignment]
    return BUILT_IN


def _module_of(namespace: Mapping[str, Any]) -> str:
    spec = namespace.get("__spec__")
    # A module of ours that was started with `python -m` calls itself __main__.
    return str(spec.name) if spec is not None else str(namespace.get("__name__", ""))


# Called from one of these, Hardpoint acts for itself; below them, for whoever called it.
_OWN_DOORS = (
    "hardpoint.cli",
    "hardpoint.processes",
    "hardpoint.llm",
    "hardpoint.front_end",
    "hardpoint.extensions.report",
    "hardpoint.__main__",
)
_TRANSPARENT = frozenset({"hardpoint", "vllm", *sys.stdlib_module_names}) - {"__main__"}

record = ledger.record
entries = ledger.entries
why = ledger.why
export = ledger.export
merge = ledger.merge
