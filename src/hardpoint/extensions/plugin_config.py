"""A plugin's own settings: declared by the plugin, given by the user, the same typed object in every process.

    @declare("acme", flags=True)
    @dataclass
    class Settings:
        threshold: float = 0.5

    get_plugin_config("acme").threshold

The user writes `--plugin-config acme.threshold=0.7`, or `plugin_config: {acme: {threshold: 0.7}}` in the file
of `--config`, or `LLM(plugin_config={"acme": {"threshold": 0.7}})`. What is given travels in one environment
variable, so that it is there before any plugin runs, in whatever process.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from hardpoint.extensions.declared_settings import Declaration, SettingFlag, make_declaration, make_object, refused
from hardpoint.extensions.discovery import Allowlist, catalogue
from hardpoint.extensions.ledger import current_origin, ledger
from hardpoint.extensions.points import GROUPS
from hardpoint.extensions.setting_words import (
    VARIABLE,
    PluginConfigError,
    export,
    nested,
    words_in_environment,
    words_of,
)
from hardpoint.extensions.typed_values import guess, in_words, near_miss

KindT = TypeVar("KindT", bound=type)
T = TypeVar("T")


@dataclass
class _State:
    """Of this process.

    asked       names somebody read                  made  (name, values) -> the object
    told        names reported as reaching nobody    outside  the words there were before `deliver`
    line        the command line of `serve`
    from_flags  flag -> the word it stands for
    """

    declared: dict[str, Declaration] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    made: dict[tuple[str, str], Any] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    outside: list[str] | None = None
    line: tuple[str, ...] = ()
    from_flags: dict[str, str] = field(default_factory=dict)


_state = _State()


# -- declaring and asking: what plugins call ---------------------------------------------------------


@overload
def declare(name: str, kind: KindT, flags: bool | Mapping[str, str] = ...) -> KindT: ...
@overload
def declare(name: str, kind: None = ..., flags: bool | Mapping[str, str] = ...) -> Any: ...
def declare(name: str, kind: Any = None, flags: bool | Mapping[str, str] = False) -> Any:
    """Say what settings the plugin `name` has. Without `kind`, a class decorator.

    name   what users write before the dot: best the entry point's name
    kind   a dataclass or pydantic model; a field without a default must be given
    flags  flags of `serve`: True for `--NAME-FIELD` for every field, or {field: "--flag"}
    Raises RegistrationError (a ValueError) for a name or flag that another plugin has.
    """
    if kind is None:
        return lambda decorated: declare(name, decorated, flags)
    origin = current_origin()
    declaration = make_declaration(name, kind, flags, origin)
    known = _state.declared.get(name)
    if known is not None and not known.is_of(kind):
        raise refused(
            f"the settings of {name!r} are declared twice, by {known.origin.label} and by {origin.label}", origin
        )
    for other in _state.declared.values():
        shared = set(other.flags.values()) & set(declaration.flags.values())
        if other.name != name and shared:
            raise refused(f"{', '.join(sorted(shared))} is a flag of {other.origin.label} already", origin)
    _state.declared[name] = declaration
    ledger.record("register", "plugin_config", name, origin=origin, detail=f"{kind.__module__}:{kind.__qualname__}")
    _take_flags(declaration)
    return kind


@overload
def get_plugin_config(name: str, kind: type[T]) -> T: ...
@overload
def get_plugin_config(name: str, kind: None = ...) -> Any: ...
def get_plugin_config(name: str, kind: Any = None) -> Any:
    """The settings of the plugin `name` as the object it declared; a dict where nothing is declared.

    kind  declares it at the same time
    The same object each time, in any process. Raises PluginConfigError naming plugin, key and what is expected.
    """
    _state.asked.add(name)
    known = _state.declared.get(name)
    if kind is not None and (known is None or not known.is_of(kind)):
        declare(name, kind)
    values = settings().get(name, {})
    declaration = _state.declared.get(name)
    if declaration is None:
        return guess(values)
    key = (name, json.dumps(values, default=str))
    if key not in _state.made:
        _state.made[key] = make_object(declaration, values)
    return _state.made[key]


# -- delivery ----------------------------------------------------------------------------------------


def deliver(given: Any) -> None:
    """Make settings known in this process and in those it starts from now on, beside what the environment has.

    What an earlier call gave is replaced; None or nothing leaves all as it is. Raises PluginConfigError.
    """
    if not given:
        return
    if _state.outside is None:
        _state.outside = words_in_environment()
    export([*_state.outside, *words_of(given), *_state.from_flags.values()])


def settings() -> dict[str, dict[str, Any]]:
    """What is given for each plugin, as it was typed."""
    return nested(words_in_environment())


def plain_settings(given: Any = None) -> dict[str, dict[str, Any]]:
    """Settings as plain values, by plugin; what this process has unless given. Raises PluginConfigError."""
    plain: dict[str, dict[str, Any]] = guess(settings() if given is None else nested(words_of(given)))
    return plain


# -- flags of `serve` --------------------------------------------------------------------------------


def offer_command_line(words: Sequence[str]) -> None:
    """Let flags that plugins declare from now on be read at once, before there is a parser that knows them."""
    _state.line = tuple(words)


def setting_flags() -> list[SettingFlag]:
    """Every flag that the plugins of this process declared."""
    return [flag for declaration in _state.declared.values() for flag in declaration.setting_flags()]


def _take_flags(declaration: Declaration) -> None:
    """Deliver what the command line says for the flags of a new declaration; a parser will check it."""
    taken = {}
    for one in declaration.setting_flags():
        value = _value_on_line(one)
        if value is not None:
            taken[one.flag] = one.word(value)
    if taken:
        _state.from_flags.update(taken)
        export([*words_in_environment(), *taken.values()])


def _value_on_line(one: SettingFlag) -> str | None:
    found = None
    for place, word in enumerate(_state.line):
        if word == "--":
            break
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if one.kind is bool and name in (one.flag, f"--no-{one.flag[2:]}"):
            found = "true" if name == one.flag else "false"
        elif name == one.flag:
            found = value if equals else next(iter(_state.line[place + 1 : place + 2]), None)
    return found


# -- checks ------------------------------------------------------------------------------------------


def check_given() -> None:
    """Hold what is given against what is declared so far. Raises PluginConfigError."""
    given = settings() if VARIABLE in os.environ else {}
    asked = set(_state.asked)
    for name in given:
        if name in _state.declared:
            get_plugin_config(name)
    _state.asked = asked


def unused(final: bool = False) -> list[tuple[str, str]]:
    """(name, why) of settings that reach nobody, each once.

    final  everything that could declare or read settings has run by now
    """
    found = []
    for name in settings() if VARIABLE in os.environ else {}:
        if name in _state.told or name in _state.declared or name in _state.asked:
            continue
        why = _why_unused(name, final)
        if why:
            _state.told.add(name)
            found.append((name, why))
    return found


def _why_unused(name: str, final: bool) -> str:
    everything = [point for group in catalogue.all().values() for point in group]
    points = [point for point in everything if name == point.name or _spelled(name) == _spelled(point.distribution)]
    if not points:
        known = {*_state.declared, *(point.name for point in everything if not point.built_in)}
        return f"no plugin of this name is installed or declares settings{near_miss(name, known)}"
    packages = {point.distribution for point in points}
    elsewhere = [repr(one.name) for one in _state.declared.values() if one.origin.distribution in packages]
    if elsewhere:
        return f"{points[0].package} has its settings under {' and '.join(elsewhere)}"
    allowlist, rows = Allowlist.read(), {row.group: row for row in GROUPS}
    refusals = [allowlist.refusal(rows.get(point.group), point.name) for point in points]
    if all(refusals):
        return f"the plugin is left out ({refusals[0]})"
    return "the plugin neither declares nor reads settings" if final else ""


def _spelled(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def declared() -> list[dict[str, Any]]:
    """Every declaration as plain data: who, which settings, what each expects, its flag."""
    return [
        {
            "name": one.name,
            "origin": one.origin.label,
            "settings": {key: in_words(kind) for key, kind in one.kinds().items()},
            "flags": dict(one.flags),
        }
        for one in _state.declared.values()
    ]


@contextmanager
def transaction() -> Iterator[None]:
    """Keep the declarations made inside the block only if it ends without an exception."""
    saved = dict(_state.declared)
    try:
        yield
    except BaseException:
        _state.declared = saved
        raise


@contextmanager
def isolated() -> Iterator[None]:
    """Undo every declaration made inside the block when it ends, and what was given there (tests)."""
    global _state  # noqa: PLW0603 - one state per process
    saved, text = _state, os.environ.get(VARIABLE)
    # Modules that are imported already will not declare again.
    _state = _State(declared=dict(saved.declared))
    try:
        yield
    finally:
        _state = saved
        os.environ.pop(VARIABLE, None)
        if text is not None:
            os.environ[VARIABLE] = text


__all__ = ["PluginConfigError", "declare", "get_plugin_config"]
