"""Turn plain values and command-line text into what a type annotation asks for. Standard library only.

Understands bool, int, float, str, Path, None, Any, Literal, Enum, unions, lists, tuples, sets, dicts and
dataclasses of these. Errors say where the value stands, what it is and what is expected.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import enum
import json
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_LISTS: dict[Any, type] = {list: list, tuple: tuple, set: set, frozenset: frozenset, collections.abc.Sequence: list}
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path", Any: "anything"}
_SHOWN = 80


class Text(str):
    """A value as somebody typed it; its meaning depends on the type that is asked for."""

    __slots__ = ()


class ValueProblem(Exception):
    """A value that is not what a type asks for.

    path  where it stands below the whole, such as `server.port`; empty for the whole
    """

    def __init__(self, path: str, what: str) -> None:
        super().__init__(what)
        self.path = path
        self.what = what


def convert(value: Any, kind: Any, path: str = "") -> Any:
    """`value` as `kind`; ValueProblem when it is not that."""
    kind = _plain_kind(kind)
    if kind is Any or kind is object:
        return guess(value)
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, kind, path)
    if origin is typing.Literal:
        return _convert_literal(value, kind, path)
    if dataclasses.is_dataclass(kind):
        return _convert_dataclass(value, kind, path)
    if (origin or kind) in _LISTS:
        return _convert_list(value, kind, path)
    if (origin or kind) in (dict, collections.abc.Mapping, collections.abc.MutableMapping):
        return _convert_dict(value, kind, path)
    return _convert_scalar(value, kind, path)


def guess(value: Any) -> Any:
    """Text that is JSON as what it stands for, other text as itself; also inside dicts and lists."""
    if isinstance(value, Text):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return str(value)
    if isinstance(value, dict):
        return {key: guess(item) for key, item in value.items()}
    return [guess(item) for item in value] if isinstance(value, list) else value


def in_words(kind: Any) -> str:
    """A type for people, such as `a whole number` or `'fast' or 'exact'`."""
    kind = _plain_kind(kind)
    arguments = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if kind is type(None):
        return "null"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(in_words(part) for part in arguments)
    if origin is typing.Literal:
        return " or ".join(repr(choice) for choice in arguments)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return " or ".join(repr(member.value) for member in kind)
    if (origin or kind) in _LISTS:
        parts = [part for part in arguments if part is not Ellipsis]
        return f"a list of {in_words(parts[0])} each" if parts else "a list"
    if (origin or kind) in (dict, collections.abc.Mapping, collections.abc.MutableMapping):
        return "a JSON object"
    if dataclasses.is_dataclass(kind):
        fields = ", ".join(field.name for field in dataclasses.fields(kind))
        return f"a JSON object with {fields}"
    return _NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def near_miss(word: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` for close matches, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(repr(name) for name in close)}?" if close else ""


def field_kinds(kind: Any) -> dict[str, Any]:
    """The constructor fields of a dataclass with their types."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints.get(field.name, Any) for field in dataclasses.fields(kind) if field.init}


def check_fields(values: Mapping[str, Any], kind: Any, path: str = "") -> tuple[dict[str, Any], list[ValueProblem]]:
    """Convert what is given for a dataclass's fields; every problem there is, rather than the first."""
    kinds, found, problems = field_kinds(kind), {}, []
    for key, value in values.items():
        below = f"{path}.{key}".lstrip(".")
        if key not in kinds:
            problems.append(ValueProblem(below, unknown(key, kinds)))
            continue
        try:
            found[key] = convert(value, kinds[key], below)
        except ValueProblem as problem:
            problems.append(problem)
    for field in dataclasses.fields(kind):
        lacks = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if field.init and lacks and field.name not in values:
            missing = f"is missing: expected {in_words(kinds[field.name])}"
            problems.append(ValueProblem(f"{path}.{field.name}".lstrip("."), missing))
    return found, problems


def unknown(key: str, known: Iterable[str]) -> str:
    """What is wrong with a key that is none of `known`."""
    names = list(known)
    hint = near_miss(key, names)
    return f"is not known{hint or ';'} there are: {', '.join(names) or 'none'}"


def _plain_kind(kind: Any) -> Any:
    while True:
        if typing.get_origin(kind) is typing.Annotated:
            kind = typing.get_args(kind)[0]
        elif isinstance(kind, typing.NewType):
            kind = kind.__supertype__
        else:
            return type(None) if kind is None else kind


def _wrong(value: Any, kind: Any, path: str) -> ValueProblem:
    shown = repr(str(value) if isinstance(value, Text) else value)
    shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
    return ValueProblem(path, f"is {shown}: expected {in_words(kind)}")


def _convert_union(value: Any, kind: Any, path: str) -> Any:
    every = typing.get_args(kind)
    parts = [part for part in every if part is not type(None)]
    if len(parts) < len(every) and (value is None or (isinstance(value, Text) and value == "null")):
        return None
    if len(parts) == 1:
        return convert(value, parts[0], path)
    # A number is tried before text, which would take anything that is typed.
    for part in sorted(parts, key=lambda part: _plain_kind(part) is str):
        try:
            return convert(value, part, path)
        except ValueProblem:
            continue
    raise _wrong(value, kind, path)


def _convert_literal(value: Any, kind: Any, path: str) -> Any:
    for choice in typing.get_args(kind):
        same = isinstance(value, Text) and str(value) == str(choice)
        if same or (type(choice) is type(value) and choice == value):
            return choice
    problem = _wrong(value, kind, path)
    hint = near_miss(str(value), [str(choice) for choice in typing.get_args(kind)])
    raise ValueProblem(path, problem.what + hint)


def _convert_dataclass(value: Any, kind: Any, path: str) -> Any:
    value = _parsed(value)
    if isinstance(value, kind):
        return value
    if not isinstance(value, dict):
        raise _wrong(value, kind, path)
    found, problems = check_fields(value, kind, path)
    if problems:
        raise problems[0]
    return build(kind, found, path)


def build(kind: Any, values: dict[str, Any], path: str = "") -> Any:
    """Call a dataclass; what its own checks raise becomes a ValueProblem."""
    try:
        return kind(**values)
    except ValueProblem:
        raise
    except Exception as error:
        raise ValueProblem(path, f"is refused by {kind.__name__}: {type(error).__name__}: {error}") from error


def _convert_list(value: Any, kind: Any, path: str) -> Any:
    make = _LISTS[typing.get_origin(kind) or kind]
    items = _listed(value)
    if items is None:
        raise _wrong(value, kind, path)
    arguments = typing.get_args(kind)
    if make is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(arguments) != len(items):
            raise ValueProblem(path, f"has {len(items)} items: expected {len(arguments)}")
        kinds = list(arguments)
    else:
        kinds = [arguments[0] if arguments else Any] * len(items)
    return make(convert(item, one, f"{path}[{i}]") for i, (item, one) in enumerate(zip(items, kinds, strict=True)))


def _listed(value: Any) -> list[Any] | None:
    if isinstance(value, Text) and not value.lstrip().startswith("["):
        return [Text(part.strip()) for part in value.split(",") if part.strip()]
    value = _parsed(value)
    return list(value) if isinstance(value, (list, tuple, set, frozenset)) else None


def _convert_dict(value: Any, kind: Any, path: str) -> Any:
    found = _parsed(value)
    if not isinstance(found, dict):
        raise _wrong(value, kind, path)
    key_kind, value_kind = typing.get_args(kind) or (Any, Any)
    return {
        convert(Text(key) if isinstance(key, str) else key, key_kind, path): convert(item, value_kind, f"{path}.{key}")
        for key, item in found.items()
    }


def _parsed(value: Any) -> Any:
    return guess(value) if isinstance(value, Text) else value


def _convert_scalar(value: Any, kind: Any, path: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        for member in kind:
            if value is member or str(value) in (str(member.value), member.name):
                return member
        raise _wrong(value, kind, path)
    if isinstance(value, Text):
        return _from_text(value, kind, path)
    if kind is Path and isinstance(value, (str, Path)):
        return Path(value)
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(kind, type) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise _wrong(value, kind, path)


def _from_text(text: Text, kind: Any, path: str) -> Any:
    if kind in (str, Path):
        return kind(_unquoted(text))
    if kind is type(None) and text == "null":
        return None
    if kind is bool and text.lower() in (*_TRUE, *_FALSE):
        return text.lower() in _TRUE
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise _wrong(text, kind, path) from None
    raise _wrong(text, kind, path)


def _unquoted(text: str) -> str:
    """Text in JSON's quotes without them; other text as it is."""
    if not text.startswith('"'):
        return str(text)
    try:
        found = json.loads(text)
    except ValueError:
        return str(text)
    return found if isinstance(found, str) else str(text)
