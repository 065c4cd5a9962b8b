"""Calls written with tags: each parameter in a tag of its own, as text; types come from the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hardpoint.front_end.parsers.calls import Body, Reading, Sink, first_mark
from hardpoint.front_end.parsers.json_text import WHITESPACE
from hardpoint.front_end.parsers.pythonic_calls import read_literal
from hardpoint.front_end.parsers.tool_facts import find_tool_properties

_MAX_NAME_CHARS = 256


def _listed(thing: Any) -> list[Any]:
    """A list as it is, nothing as none, anything else as a list of it: a client's schema may say anything."""
    return thing if isinstance(thing, list) else [] if thing is None else [thing]


def types_of(schema: Any, depth: int = 0) -> frozenset[str]:
    """The JSON types a schema allows; empty when it does not say."""
    if not isinstance(schema, dict) or depth > 8:
        return frozenset()
    found = {word for word in _listed(schema.get("type")) if isinstance(word, str)}
    for word in ("anyOf", "oneOf", "allOf"):
        for one in _listed(schema.get(word)):
            found |= types_of(one, depth + 1)
    if not found and "properties" in schema:
        found.add("object")
    choices = _listed(schema.get("enum"))
    if not found and choices and all(isinstance(value, str) for value in choices):
        found.add("string")
    return frozenset(found)


def typed(text: str, schema: Any, guess: bool) -> Any:
    """A parameter's text as the value its schema asks for; as text where it is none.

    guess  without a type in the schema, what is JSON is taken for it
    """
    types = types_of(schema)
    word = text.strip(WHITESPACE)
    if "null" in types and word in ("null", "None"):
        return None
    if "string" in types or (not types and not guess):
        return text
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower() == "true"
    try:
        return json.loads(word, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return _python_literal(word, text) if types & {"object", "array"} else text


def _python_literal(word: str, otherwise: str) -> Any:
    """A list or dict as Python writes it, which some models do."""
    try:
        found = read_literal(word)
        json.dumps(found, allow_nan=False)
    except ValueError:
        return otherwise
    return found


def _no_constant(word: str) -> Any:
    raise ValueError(word)


@dataclass(frozen=True)
class TaggedCalls:
    """`<function=f><parameter=a>1</parameter></function>` and its relatives.

    call       stands in front of a function's name, and `call_tail` behind it
    parameter  stands in front of a parameter's name; `parameter_tail` ends its tag, attributes before it included
    part_end   behind all calls of a part; one of them may also end a call whose end tag is missing
    guess      a value without a type in the schema is taken for JSON where it is that
    """

    call: str
    call_tail: str
    parameter: str
    parameter_name_end: str
    parameter_tail: str
    parameter_end: str
    call_end: str
    part_end: str
    guess: bool = False

    def __call__(self, sink: Sink, tools: Sequence[object], mark: str) -> Body:
        """The reader of one part."""
        return _TaggedBody(self, sink, tools, begun=mark == self.call)


class _TagBody(Body):
    """What bodies of tags share: a state per place, and how parameters become arguments."""

    def __init__(self, sink: Sink, tools: Sequence[object], guess: bool) -> None:
        super().__init__(sink, tools)
        self._guess = guess
        self._name = ""
        self._key = ""
        self._keys: set[str] = set()
        self._state: Any = None

    def feed(self, text: str) -> tuple[Reading, int]:
        used = 0
        while True:
            state = self._state
            reading, taken = state(text[used:])
            used += taken
            if reading is not None or (not taken and self._state == state):
                return reading or Reading.MORE, used

    def _begin(self, name: str) -> bool:
        name = name.strip(WHITESPACE)
        if not name or len(name) > _MAX_NAME_CHARS or any(sign in name for sign in "<>\n"):
            return False
        self._name, self._keys = name, set()
        self.sink.begin(name)
        self.sink.arguments("{")
        return True

    def _parameter(self, text: str, as_text: bool | None = None) -> None:
        """A parameter is complete.

        as_text  what its tag says about it; None asks the schema
        """
        if self._key in self._keys:
            return
        text = text.removeprefix("\n").removesuffix("\n")
        schema = find_tool_properties(self.tools, self._name).get(self._key)
        if as_text is False:
            schema = {}
        value = text if as_text else typed(text, schema, self._guess or as_text is False)
        comma = ", " if self._keys else ""
        self._keys.add(self._key)
        self.sink.arguments(f"{comma}{_dumped(self._key)}: {_dumped(value)}")

    def _end_call(self) -> None:
        self.sink.arguments("}")

    @staticmethod
    def _one_of(text: str, *marks: str) -> tuple[int, str | None]:
        """Which mark stands next, behind white space, and where it ends; "" = not there yet, None = other text."""
        begins = text.lstrip(WHITESPACE)
        at = len(text) - len(begins)
        for mark in marks:
            if begins.startswith(mark):
                return at + len(mark), mark
        return at, "" if any(mark.startswith(begins) for mark in marks) else None


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class _TaggedBody(_TagBody):
    def __init__(self, form: TaggedCalls, sink: Sink, tools: Sequence[object], begun: bool) -> None:
        super().__init__(sink, tools, form.guess)
        self._form = form
        self._as_text: bool | None = None
        # Some models leave the mark of the part out.
        self._state = self._naming if begun else self._outside

    def _outside(self, text: str) -> tuple[Reading | None, int]:
        """Between the part's mark and a call, or behind a call."""
        used, mark = self._one_of(text, self._form.call, self._form.part_end)
        if mark == "":
            return None, 0
        if mark == self._form.call:
            self._state = self._naming
            return None, used
        return (Reading.DONE if self.sink.begun else Reading.BAD), used if mark else 0

    def _naming(self, text: str) -> tuple[Reading | None, int]:
        at, mark = first_mark(text, (self._form.call_tail,))
        if not mark:
            return (Reading.BAD if len(text) > _MAX_NAME_CHARS or "\n" in text else None), 0
        if not self._begin(text[:at].strip("\"'")):
            return Reading.BAD, 0
        self._state = self._inside
        return None, at + len(mark)

    def _inside(self, text: str) -> tuple[Reading | None, int]:
        """Between parameters."""
        form = self._form
        used, mark = self._one_of(text, form.parameter, form.call_end, form.part_end)
        if mark == "":
            return None, 0
        if mark == form.parameter:
            self._state = self._key_of
            return None, used
        if mark is None:
            return Reading.BAD, 0
        self._end_call()
        self._state = self._outside
        # The part's end also ends a call whose end tag is missing.
        return None, used if mark == form.call_end else used - len(mark)

    def _key_of(self, text: str) -> tuple[Reading | None, int]:
        at, mark = first_mark(text, (self._form.parameter_tail,))
        if not mark:
            return (Reading.BAD if len(text) > 2 * _MAX_NAME_CHARS else None), 0
        tag = text[:at] + mark
        key, _, attributes = tag.partition(self._form.parameter_name_end)
        self._as_text = None
        if 'string="' in attributes:
            self._as_text = 'string="true"' in attributes
        self._key = key.strip("\"'" + WHITESPACE)
        self._state = self._value
        return (None, at + len(mark)) if self._key else (Reading.BAD, 0)

    def _value(self, text: str) -> tuple[Reading | None, int]:
        at, mark = first_mark(text, (self._form.parameter_end, self._form.call_end))
        if not mark:
            return None, 0
        self._parameter(text[:at], self._as_text)
        self._state = self._inside
        return None, at + (len(mark) if mark == self._form.parameter_end else 0)

    def close(self, text: str) -> bool:
        return self._state == self._outside and bool(self.sink.begun)


@dataclass(frozen=True)
class KeyedCalls:
    """`name<arg_key>a</arg_key><arg_value>1</arg_value>` up to an end mark."""

    end: str
    guess: bool = True

    def __call__(self, sink: Sink, tools: Sequence[object], mark: str) -> Body:
        """The reader of one call."""
        return _KeyedBody(self, sink, tools)


class _KeyedBody(_TagBody):
    def __init__(self, form: KeyedCalls, sink: Sink, tools: Sequence[object]) -> None:
        super().__init__(sink, tools, form.guess)
        self._end = form.end
        self._state = self._naming

    def _naming(self, text: str) -> tuple[Reading | None, int]:
        at, mark = first_mark(text, ("<arg_key>", self._end))
        name = text[:at].strip(WHITESPACE)
        if "\n" in name or "{" in name or len(name) > _MAX_NAME_CHARS:
            return Reading.BAD, 0
        if not mark:
            return None, 0
        if not self._begin(name):
            return Reading.BAD, 0
        self._state = self._inside
        return None, at

    def _inside(self, text: str) -> tuple[Reading | None, int]:
        used, mark = self._one_of(text, "<arg_key>", self._end)
        if mark == self._end:
            self._end_call()
            self._state = self._over
            return Reading.DONE, used
        if mark == "":
            return None, 0
        self._state = self._key_of
        return (Reading.BAD, 0) if mark is None else (None, used)

    def _over(self, text: str) -> tuple[Reading | None, int]:
        return Reading.DONE, 0

    def _key_of(self, text: str) -> tuple[Reading | None, int]:
        at, mark = first_mark(text, ("</arg_key>",))
        if not mark:
            return (Reading.BAD if len(text) > 2 * _MAX_NAME_CHARS else None), 0
        self._key = text[:at].strip(WHITESPACE)
        self._state = self._before_value
        return None, at + len(mark)

    def _before_value(self, text: str) -> tuple[Reading | None, int]:
        used, mark = self._one_of(text, "<arg_value>")
        if mark == "":
            return None, 0
        self._state = self._value
        return (Reading.BAD, 0) if mark is None else (None, used)

    def _value(self, text: str) -> tuple[Reading | None, int]:
        at, mark = first_mark(text, ("</arg_value>",))
        if not mark:
            return None, 0
        self._parameter(text[:at])
        self._state = self._inside
        return None, at + len(mark)

    def close(self, text: str) -> bool:
        return self._state == self._over
