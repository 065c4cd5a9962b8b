"""The one registry class: named entries of a row, from `builtins` and from plugins.

`registry("models")` is the registry of that row. What may be registered, what a second
registration does and who reads it are columns of the row; nothing here knows a row by name.
"""

from __future__ import annotations

import difflib
import os
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hardpoint.errors import ConfigError, HardpointError, RegistrationError
from hardpoint.extensions import rows
from hardpoint.extensions.builtins import BUILTINS
from hardpoint.extensions.ledger import BUILT_IN, Origin, current_origin, ledger
from hardpoint.extensions.points import REGISTRIES
from hardpoint.extensions.refs import RefShapeError, load_ref, loaded_ref, parse_ref
from hardpoint.log import init_logger

logger = init_logger("hardpoint.extensions")


class RegistrationTypeError(RegistrationError, TypeError):
    """A registration with a wrong kind of name or value."""


class DuplicateAssertion(RegistrationError, AssertionError):
    """A name that is taken, in a row whose callers expect an AssertionError."""


class DuplicateKeyError(RegistrationError, KeyError):
    """A name that is taken, in a row whose callers expect a KeyError."""


class UnknownEntryError(RegistrationError, KeyError):
    """A name that is not registered."""


class PlannedError(ConfigError):
    """The use of a row that this version does not have yet."""


_DUPLICATE_ERRORS: dict[rows.Duplicate, type[RegistrationError]] = {
    rows.Duplicate.REFUSE: RegistrationError,
    rows.Duplicate.ASSERT: DuplicateAssertion,
    rows.Duplicate.KEY_ERROR: DuplicateKeyError,
}
_NOT_GIVEN: Any = object()
_lock = threading.RLock()


@dataclass(slots=True)
class Entry:
    """One registered thing: a reference string until it is first loaded, or the object itself."""

    name: str
    origin: Origin
    ref: str = ""
    pid: int = field(default_factory=os.getpid)
    _value: Any = _NOT_GIVEN

    @property
    def built_in(self) -> bool:
        """Whether it is ours."""
        return self.origin is BUILT_IN

    @property
    def is_loaded(self) -> bool:
        """Whether the object is at hand without an import."""
        return self._value is not _NOT_GIVEN

    @property
    def target(self) -> str:
        """What it points at, in words."""
        if self.ref:
            return self.ref
        kind = self._value if isinstance(self._value, type) else type(self._value)
        return f"{kind.__module__}:{kind.__qualname__}"

    def load(self) -> Any:
        """The object; imports it the first time. A failed import is tried again next time."""
        if not self.is_loaded:
            self._value = load_ref(self.ref)
        return self._value


class Registry:
    """The entries of one row, in order of registration."""

    def __init__(self, row: rows.Registry, builtins: dict[str, str]) -> None:
        self.row = row
        self._entries = {name: Entry(name, BUILT_IN, ref) for name, ref in builtins.items()}

    @property
    def key(self) -> str:
        """The row's key."""
        return self.row.key

    def names(self) -> list[str]:
        """The names of all entries, in order."""
        return list(self._entries)

    def entries(self) -> list[Entry]:
        """All entries, in order."""
        return list(self._entries.values())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(name) is not None

    def get(self, name: str) -> Entry | None:
        """The entry with this name, or None."""
        entry = self._entries.get(name)
        if entry is None and self.row.case is rows.Case.ANY and isinstance(name, str):
            folded = name.casefold()
            entry = next((e for e in self._entries.values() if e.name.casefold() == folded), None)
        return entry

    def entry(self, name: str) -> Entry:
        """The entry with this name; UnknownEntryError with the nearest names otherwise."""
        found = self.get(name)
        if found is None:
            near = difflib.get_close_matches(str(name), self._entries, n=3)
            known = ", ".join(near or sorted(self._entries)[:20]) or "none"
            raise UnknownEntryError(
                f"{self.key} has no entry {name!r}",
                code="ext-unknown",
                fix=f"{'did you mean' if near else 'known are'}: {known}",
            )
        return found

    def load(self, name: str) -> Any:
        """Select an entry and return its object.

        Raises UnknownEntryError, PlannedError for a row nothing reads yet, what importing the
        reference raises, or the row's error when the object is of the wrong kind.
        """
        self.require_built(name)
        entry = self.entry(name)
        try:
            value = entry.load()
        except HardpointError as error:
            error.origin = error.origin or ("" if entry.built_in else entry.origin.label)
            raise
        if entry.ref and not entry.built_in:
            self._check_class(name, value, entry.origin)
        return value

    def note_use(self, name: str, what: str) -> None:
        """Tell the ledger what an entry is used for; nothing when it is ours."""
        entry = self.entry(name)
        if not entry.built_in:
            ledger.record("override", self.key, entry.name, origin=entry.origin, detail=f"{entry.target} {what}")

    def require_built(self, name: str) -> None:
        """Raise PlannedError, naming the choice, if nothing in this version reads the row."""
        if self.row.state is rows.State.PLANNED:
            raise planned_error(self.row.key, f"{self.row.key} entry {name!r}", self.row.chosen_by)

    def register(self, name: str, value: Any, origin: Origin | None = None, *, strict: bool = False) -> Entry:
        """Add an entry; `value` is a class, an object or a reference, as the row takes.

        strict  apply the row's stricter duplicate rule
        Raises RegistrationError (a ValueError), RegistrationTypeError, or the row's error for a
        name that is taken. Nothing is imported.
        """
        return self._add(name, value, origin, self.row.strict_duplicate if strict else self.row.duplicate)

    def put(self, name: str, value: Any, origin: Origin | None = None) -> Entry:
        """Add or replace an entry, whatever the row's duplicate rule; the ledger tells of it."""
        return self._add(name, value, origin, rows.Duplicate.REPLACE_QUIET)

    def _add(self, name: str, value: Any, origin: Origin | None, rule: rows.Duplicate) -> Entry:
        who = origin if origin is not None else current_origin()
        entry = self._make_entry(name, value, who)
        with _lock:
            existing = self._entries.get(name)
            # A forked child runs its plugins again on what it inherited: that is no duplicate.
            if existing is not None and existing.pid != entry.pid and _same_author(existing.origin, who):
                existing = None
            if existing is not None:
                self._apply_duplicate_rule(existing, entry, rule)
            self._entries[name] = entry
        if existing is None:
            ledger.record("register", self.key, name, origin=who, detail=entry.target)
        else:
            detail = f"{entry.target} replaces {describe(existing)}"
            ledger.record("replace", self.key, name, origin=who, detail=detail)
        if self.row.state is rows.State.PLANNED:
            self._warn_planned(name, who)
        return entry

    def unregister(self, name: str) -> None:
        """Remove an entry; UnknownEntryError when there is none."""
        with _lock:
            entry = self.entry(name)
            del self._entries[entry.name]
        ledger.record("unregister", self.key, entry.name, detail=entry.target)

    @contextmanager
    def isolated(self) -> Iterator[Registry]:
        """Undo every change made inside the block when it ends (tests)."""
        saved = dict(self._entries)
        try:
            yield self
        finally:
            self._entries = saved

    def mapping(self) -> MutableMapping[str, Any]:
        """A live dict-like view, name to object, through which entries can also be set and removed."""
        return RegistryMapping(self)

    def _make_entry(self, name: str, value: Any, origin: Origin) -> Entry:
        if not isinstance(name, str):
            raise RegistrationTypeError(
                f"{self.key}: a name must be a str, not {type(name).__name__}",
                code="ext-name",
                origin=origin.label,
                fix="give the name as text",
            )
        takes = self.row.takes
        if isinstance(value, str):
            if rows.Value.REF not in takes:
                raise self._wrong_value(name, value, origin)
            return Entry(name, origin, self._checked_ref(name, value, origin))
        if isinstance(value, type) and rows.Value.CLASS in takes:
            self._check_class(name, value, origin)
        elif rows.Value.OBJECT not in takes:
            raise self._wrong_value(name, value, origin)
        return Entry(name, origin, _value=value)

    def _checked_ref(self, name: str, ref: str, origin: Origin) -> str:
        try:
            parse_ref(ref)
        except RefShapeError as error:
            raise RegistrationError(
                f"{self.key} entry {name!r}: {error.what}", code=error.code, origin=origin.label, fix=error.fix
            ) from None
        return ref

    def _wrong_value(self, name: str, value: Any, origin: Origin) -> RegistrationTypeError:
        takes = " or ".join(_TAKES[part] for part in self.row.takes)
        return RegistrationTypeError(
            f"{self.key} entry {name!r} cannot be {type(value).__name__} {value!r}",
            code="ext-value",
            origin=origin.label,
            fix=f"give {takes}",
        )

    def _check_class(self, name: str, value: Any, origin: Origin) -> None:
        check = self.row.check
        if check is rows.Check.NOTHING:
            return
        kind = RegistrationError if check is rows.Check.SUBCLASS_VALUE_ERROR else RegistrationTypeError
        if not isinstance(value, type):
            raise kind(
                f"{self.key} entry {name!r} is not a class but {type(value).__name__}",
                code="ext-value",
                origin=origin.label,
                fix="register a class",
            )
        if check is rows.Check.A_CLASS:
            return
        # A class can only derive from a base whose module is imported already.
        base = loaded_ref(self.row.base)
        if base is None or not issubclass(value, base):
            raise kind(
                f"{self.key} entry {name!r}: {value.__module__}.{value.__qualname__} does not derive from "
                f"{self.row.base.replace(':', '.')}",
                code="ext-base",
                origin=origin.label,
                fix="derive the class from it",
            )

    def _apply_duplicate_rule(self, existing: Entry, new: Entry, rule: rows.Duplicate) -> None:
        if rule in _DUPLICATE_ERRORS:
            raise _DUPLICATE_ERRORS[rule](
                f"{self.key} entry {new.name!r} is taken: it belongs to {describe(existing)}, "
                f"and {new.target} wants the same name",
                code="ext-duplicate",
                origin=new.origin.label,
                fix="choose another name, or leave one of the two plugins out with VLLM_PLUGINS",
            )
        # Whoever loses an entry to somebody else is told, also where the row takes the last one without a word.
        another = not _same_author(existing.origin, new.origin) and existing.target != new.target
        log = logger.warning if rule is rows.Duplicate.REPLACE_WARN or another else logger.debug
        log(
            "%s entry %r is replaced: it was %s, now %s [from %s]",
            self.key,
            new.name,
            describe(existing),
            new.target,
            new.origin.label,
        )

    def _warn_planned(self, name: str, origin: Origin) -> None:
        what = f"{self.key} entry {name!r} is noted, but this version does not use {self.key} yet"
        ledger.record("warn", self.key, name, origin=origin, detail=what)
        logger.warning("%s [from %s]", what, origin.label)


class RegistryMapping(MutableMapping[str, Any]):
    """A registry as the dict that plugins reach for: reads load, writes register, pops unregister."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def __contains__(self, name: object) -> bool:
        # Asking imports nothing.
        return name in self._registry._entries

    def __getitem__(self, name: str) -> Any:
        entry = self._registry._entries.get(name)
        if entry is None:
            raise KeyError(name)
        return entry.load()

    def __setitem__(self, name: str, value: Any) -> None:
        # A dict takes the last value; so does this one, whatever the row's rule for its register call.
        self._registry.put(name, value)

    def __delitem__(self, name: str) -> None:
        if name not in self._registry._entries:
            raise KeyError(name)
        self._registry.unregister(name)

    def pop(self, name: str, *default: Any) -> Any:
        """Unregister an entry; return its object, or its reference if that was never imported."""
        entry = self._registry._entries.get(name)
        if entry is None and default:
            return default[0]
        # Taking something out must not run its author's code.
        del self[name]
        assert entry is not None
        return entry._value if entry.is_loaded else entry.ref

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._registry._entries))

    def __len__(self) -> int:
        return len(self._registry._entries)

    def __repr__(self) -> str:
        shown = {e.name: e._value if e.is_loaded else e.ref for e in self._registry.entries()}
        return repr(shown)


_TAKES = {
    rows.Value.CLASS: "a class",
    rows.Value.REF: "a reference such as 'my_package.module:Class'",
    rows.Value.OBJECT: "an object",
    rows.Value.FUNCTION: "a function",
    rows.Value.FACTORY: "a factory",
}


def describe(entry: Entry) -> str:
    """An entry's target and owner, for messages."""
    return f"{entry.target} ({entry.origin.label})"


def _same_author(one: Origin, other: Origin) -> bool:
    return (one.distribution, one.group, one.entry_point, one.module) == (
        other.distribution,
        other.group,
        other.entry_point,
        other.module,
    )


def planned_error(key: str, what: str, how: str) -> PlannedError:
    """The refusal of something whose row this version does not read yet."""
    return PlannedError(
        f"{what} was chosen, but this version of Hardpoint does not have {key} yet",
        code="ext-planned",
        fix=f"leave it out ({how})" if how else "leave it out",
    )


_registries = {row.key: Registry(row, BUILTINS.get(row.key, {})) for row in REGISTRIES}


def registry(key: str) -> Registry:
    """The registry of the row with this key; KeyError when there is no such row."""
    return _registries[key]


@contextmanager
def isolated() -> Iterator[None]:
    """Undo every registration made inside the block when it ends (tests)."""
    saved = _snapshot()
    try:
        yield
    finally:
        _restore(saved)


@contextmanager
def transaction() -> Iterator[None]:
    """Keep the registrations made inside the block only if it ends without an exception."""
    saved = _snapshot()
    try:
        yield
    except BaseException:
        _record_rollback(saved)
        _restore(saved)
        raise


def _snapshot() -> dict[str, dict[str, Entry]]:
    with _lock:
        return {key: dict(one._entries) for key, one in _registries.items()}


def _restore(saved: dict[str, dict[str, Entry]]) -> None:
    with _lock:
        for key, entries in saved.items():
            _registries[key]._entries = entries


def _record_rollback(saved: dict[str, dict[str, Entry]]) -> None:
    for key, before in saved.items():
        now = _registries[key]._entries
        for name in [*now, *(n for n in before if n not in now)]:
            if now.get(name) is not before.get(name):
                back = f"back to {describe(before[name])}" if name in before else "removed"
                ledger.record("rollback", key, name, detail=back)
