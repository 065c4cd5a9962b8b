"""What all sections share: checked values, near-miss errors, and a note of who writes."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import sys
import typing
from functools import cache
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec

from hardpoint.errors import ConfigError
from hardpoint.extensions.ledger import ledger

# What is larger fits into no array, and is a mistake.
_MOST = 2**31 - 1
Positive = Annotated[int, msgspec.Meta(ge=1, le=_MOST)]
NonNegative = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
Bytes = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
# Processes and threads are made as many as one asks for.
Processes = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
# vLLM's option bags: a dict, or an object of a plugin's own class.
Options = dict[str, Any]

_T = TypeVar("_T", bound="Section")


class Journal(Protocol):
    """Told of every write to a section that belongs to a draft."""

    def wrote(self, section: Section, name: str, old: Any, new: Any) -> None:
        """Note that `section.name` changes from `old` to `new`."""


class Section:
    """A part of the configuration: a plain mutable dataclass with vLLM's field names.

    Values are checked when the section is made; `ConfigError` names field, value and rule.
    """

    def __post_init__(self) -> None:
        self.check()

    def __setattr__(self, name: str, value: Any) -> None:
        journal: Journal | None = self.__dict__.get("_journal")
        if journal is not None:
            journal.wrote(self, name, getattr(self, name, None), value)
        elif name in self.__dict__:
            _note_early(self, name, value)
        self.__dict__[name] = value

    def check(self) -> None:
        """Hold every field against its declared type and bounds."""
        for name, kind in _checked_fields(type(self)):  # type: ignore[arg-type]
            # Not from __dict__: a derived field's default lives on the class.
            value = getattr(self, name, None)
            if not isinstance(value, Section):
                check_value(f"{section_name(type(self))}.{name}", value, kind)

    def compute_hash(self) -> str:
        """Return a short digest of the values, equal for equal sections."""
        values = {f.name: self.__dict__.get(f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return hashlib.sha256(json.dumps(values, default=_plain, sort_keys=True).encode()).hexdigest()[:16]


def _note_early(section: Section, name: str, value: Any) -> None:
    """Tell the ledger of a plugin's write to a section that no draft watches yet, such as one in a patched seam."""
    author = ledger.origin_of_module(str(sys._getframe(2).f_globals.get("__name__", "")))
    if author is not None and section.__dict__[name] != value:
        detail = f"{section.__dict__[name]!r} -> {value!r} before the steps"
        ledger.record("config_write", "config", f"{section_name(type(section))}.{name}", origin=author, detail=detail)


def _plain(value: Any) -> Any:
    return value.compute_hash() if hasattr(value, "compute_hash") else str(value)


def section_name(cls: type) -> str:
    """`CacheConfig` -> `cache_config`, the way users see sections named."""
    out = "".join("_" + c.lower() if c.isupper() and not p.isupper() else c.lower() for p, c in _pairs(cls.__name__))
    return out.lstrip("_")


def _pairs(name: str) -> list[tuple[str, str]]:
    return list(zip("_" + name, name, strict=False))


@cache
def field_types(cls: Any) -> dict[str, Any]:
    """Return the resolved type of each field, with its bounds."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@cache
def _checked_fields(cls: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name, kind in field_types(cls).items() if kind is not Any and not section_type(kind)]


def section_type(kind: Any) -> type[Section] | None:
    """Return the section class in `kind` (`LoRAConfig` or `LoRAConfig | None`), if it is one."""
    for candidate in (kind, *typing.get_args(kind)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def check_value(where: str, value: Any, kind: Any) -> Any:
    """Return `value` as `kind`, or raise a `ConfigError` that names `where` and the rule."""
    rule = broken_rule(value, kind)
    if rule is not None:
        raise ConfigError(f"{where} is {value!r}: {rule}", code="config-value")
    return msgspec.convert(value, kind)


def broken_rule(value: Any, kind: Any) -> str | None:
    """Why `value` is no `kind`; None when it is."""
    if isinstance(value, float) and not math.isfinite(value):
        return "expected a finite number"
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as problem:
        return _rule(kind, value, problem)
    return None


def _rule(kind: Any, value: Any, problem: Exception) -> str:
    choices = literal_values(kind)
    if choices:
        return f"expected one of {', '.join(map(str, choices))}{near_miss(str(value), map(str, choices))}"
    return str(problem)[0].lower() + str(problem)[1:].replace("`", "")


def literal_values(kind: Any) -> tuple[Any, ...]:
    """Return the choices of a `Literal`, also inside `| None`."""
    if typing.get_origin(kind) is Literal:
        return typing.get_args(kind)
    for part in typing.get_args(kind):
        if typing.get_origin(part) is Literal:
            return typing.get_args(part)
    return ()


def near_miss(word: str, known: typing.Iterable[str]) -> str:
    """Return `; did you mean ...?` for a close match, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def from_mapping(cls: type[_T], values: Any, where: str | None = None) -> _T:
    """Build a section from parsed JSON or YAML; nested sections are built from nested mappings.

    Raises `ConfigError` for an unknown key (naming the near miss) or an impossible value.
    """
    where = where or section_name(cls)
    if not isinstance(values, dict):
        raise ConfigError(f"{where} takes a mapping, not {values!r}", code="config-value")
    types = field_types(cls)  # type: ignore[arg-type]
    settable = {field.name for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    built = {}
    for key, value in values.items():
        if key not in settable:
            raise ConfigError(
                f"{where} has no field {key!r}{near_miss(str(key), settable)}", code="config-unknown-field"
            )
        nested = section_type(types[key])
        if nested is not None and isinstance(value, dict):
            built[key] = from_mapping(nested, value, f"{where}.{key}")
        elif nested is not None:
            built[key] = value
        else:
            built[key] = check_value(f"{where}.{key}", value, types[key])
    return cls(**built)


def derived(default: Any = None) -> Any:
    """Declare a field that the engine fills in: not a constructor argument."""
    return dataclasses.field(default=default, init=False)
