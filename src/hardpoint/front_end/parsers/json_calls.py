"""Calls written as JSON: `{"name": ..., "arguments": {...}}`, or a name and then the arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hardpoint.front_end.parsers.calls import Body, Reading, Sink, first_mark
from hardpoint.front_end.parsers.json_text import WHITESPACE, JsonReader

_MAX_NAME_CHARS = 256
_FENCE = re.compile(r"```(?:json|JSON)?")
# What may stand between a name and its arguments.
_MOST_BETWEEN = 256


class CallObject:
    """Reads one object with a name and arguments, in any order; other keys are skipped."""

    def __init__(self, sink: Sink, form: JsonCalls) -> None:
        self.done = False
        self.bad = False
        self._sink = sink
        self._form = form
        self._expects = "{"
        self._key = ""
        self._value = JsonReader()
        self._found: dict[str, str] = {}
        self._begun = False
        self._reads = False
        self._passes_on = False

    @property
    def in_arguments(self) -> bool:
        """Whether the arguments of a call that has begun are being read."""
        return self._begun and self._passes_on and self._expects == "value"

    def feed(self, text: str, at: int) -> int:
        """Read from `text[at:]`; returns the place of the first character that is not the object's."""
        while at < len(text) and not self.done and not self.bad:
            if self._expects in ("key", "value"):
                at = self._read(text, at)
            elif text[at] in WHITESPACE or self._take(text[at]):
                at += 1
        return at

    def _take(self, char: str) -> bool:
        """One character between keys and values; whether it is used up."""
        if char in ("{", ":") and char == self._expects:
            self._expect("first" if char == "{" else "value")
            return True
        if self._expects == "first" or (self._expects == "," and char in ",}"):
            if char == "}":
                self._end()
                return True
            if char == '"' or self._expects == ",":
                self._expect("key")
                return char == ","
        self.bad = True
        return False

    def _expect(self, what: str) -> None:
        self._expects, self._value, self._reads = what, JsonReader(), False

    def _read(self, text: str, at: int) -> int:
        if not self._reads:
            if text[at] in WHITESPACE:
                return at + 1
            self._reads = True
            first = self._expects == "value" and "arguments" not in self._found
            self._passes_on = first and self._key in self._form.arguments and text[at] in "{["
        at = self._value.feed(text, at)
        if self._expects == "value" and self._passes_on and self._begun:
            self._sink.arguments(self._value.text)
            self._value.text = ""
        if self._value.bad:
            self.bad = True
        elif self._value.done:
            self._value_ended(self._value.text)
        return at

    def _value_ended(self, text: str) -> None:
        if self._expects == "key":
            if not text.startswith('"'):
                self.bad = True
                return
            self._key, self._expects = json.loads(text), ":"
            self.bad = self._form.bare and not self._begun and self._key not in self._form.keys
            return
        self._expects = ","
        if self._key in self._form.names:
            self._name(text)
        elif self._key in self._form.arguments and "arguments" not in self._found:
            if self._begun and not self._passes_on:
                self._sink.arguments(_as_arguments(text))
            self._found["arguments"] = text
        self._passes_on = False

    def _name(self, text: str) -> None:
        name = json.loads(text)
        if not isinstance(name, str) or not name or self._begun:
            self.bad = True
            return
        self._begun = True
        self._sink.begin(name)
        if "arguments" in self._found:
            self._sink.arguments(_as_arguments(self._found["arguments"]))

    def _end(self) -> None:
        if not self._begun:
            self.bad = True
            return
        if "arguments" not in self._found:
            self._sink.arguments("{}")
        self.done = True


def _as_arguments(text: str) -> str:
    """Some models write the arguments as a text that holds JSON, or null for none."""
    value = json.loads(text)
    if value is None:
        return "{}"
    return value or "{}" if isinstance(value, str) else text


@dataclass(frozen=True)
class JsonCalls:
    """A list of call objects, or call objects one after the other, up to an end mark.

    ends    marks behind them; without any, the list's bracket or the last object ends them
    bare    no mark stands in front of them: an object with other keys is no call
    fenced  a Markdown fence may stand around them
    """

    ends: tuple[str, ...] = ()
    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    bare: bool = False
    fenced: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """What a bare call may have for keys."""
        return (*self.names, *self.arguments, "type", "id")

    def __call__(self, sink: Sink, tools: Sequence[object], mark: str) -> Body:
        """The reader of one part."""
        return _JsonCallsBody(self, sink, tools)


class _JsonCallsBody(Body):
    def __init__(self, form: JsonCalls, sink: Sink, tools: Sequence[object]) -> None:
        super().__init__(sink, tools)
        self._form = form
        self._object: CallObject | None = None
        self._in_list = False
        self._list_over = False
        self._seen_object = False
        self._fence = False

    def feed(self, text: str) -> tuple[Reading, int]:
        at = 0
        while True:
            if self._object is not None:
                at = self._object.feed(text, at)
                self.in_arguments = self._object.in_arguments
                if self._object.bad:
                    return Reading.BAD, at
                if not self._object.done:
                    return Reading.MORE, at
                self._object = None
            while at < len(text) and not self._over and self._passes(text[at]):
                at += 1
            if self._over:
                return self._outcome(), at
            if at == len(text):
                return Reading.MORE, at
            if text[at] != "{" or self._list_over:
                return self._leave(text, at)
            self._object, self._seen_object = CallObject(self.sink, self._form), True

    def _passes(self, char: str) -> bool:
        """Whether a character is one of those around objects."""
        if char in WHITESPACE:
            self._fence = self._fence and char != "\n"
            return True
        if char == "[" and not self._seen_object and not self._in_list:
            self._in_list = True
            return True
        if char == "]" and self._in_list and not self._list_over:
            self._list_over = True
            return True
        if char == "`" and self._form.fenced:
            self._fence = True
            return True
        if self._fence:
            return char in "jsonJSON"
        # A closing brace too many does not undo a call.
        return self._seen_object and char in (",;}" if self._form.ends else ",;")

    @property
    def _over(self) -> bool:
        """Whether nothing that follows belongs to the part."""
        return self._list_over and not self._form.ends and not self._form.fenced

    def _leave(self, text: str, at: int) -> tuple[Reading, int]:
        here = text[at:]
        for mark in self._form.ends:
            if here.startswith(mark):
                return self._outcome(), at + len(mark)
        if any(mark.startswith(here) for mark in self._form.ends):
            return Reading.MORE, at
        return self._outcome(), at

    def _outcome(self) -> Reading:
        return Reading.DONE if self.sink.begun else Reading.BAD

    def close(self, text: str) -> bool:
        return self._object is None and bool(self.sink.begun)


@dataclass(frozen=True)
class NamedCalls:
    """A name, something between, the arguments' JSON, and an end mark.

    prefix    stands in front of the name
    name_end  what ends the name; with `{` among it, the arguments begin right there
    between   may stand between name and arguments, with text in front of it that is the call's id
    end       stands behind the arguments, "" where nothing does
    fenced    the arguments may stand in a Markdown fence
    """

    name_end: tuple[str, ...]
    prefix: str = ""
    between: str = ""
    end: str = ""
    fenced: bool = False
    numbered: bool = False

    def __call__(self, sink: Sink, tools: Sequence[object], mark: str) -> Body:
        """The reader of one call."""
        return _NamedCallBody(self, sink, tools)

    def name_and_id(self, text: str) -> tuple[str, str]:
        """The function's name and the call's id; with `numbered`, from `functions.name:0`."""
        if not self.numbered:
            return text, ""
        name = text.rpartition(":")[0] if text.rpartition(":")[2].isdigit() else text
        return name.removeprefix("functions."), text


class _NamedCallBody(Body):
    def __init__(self, form: NamedCalls, sink: Sink, tools: Sequence[object]) -> None:
        super().__init__(sink, tools)
        self._form = form
        self._state = self._prefix
        self._reader = JsonReader()

    def feed(self, text: str) -> tuple[Reading, int]:
        used = 0
        while True:
            state = self._state
            reading, taken = state(text[used:])
            used += taken
            if reading is not None or (not taken and self._state == state):
                return reading or Reading.MORE, used

    def _prefix(self, text: str) -> tuple[Reading | None, int]:
        prefix = self._form.prefix
        if text.startswith(prefix):
            self._state = self._name
            return None, len(prefix)
        return (None, 0) if prefix.startswith(text) else (Reading.BAD, 0)

    def _name(self, text: str) -> tuple[Reading | None, int]:
        at, mark = first_mark(text, self._form.name_end)
        given = text[:at]
        begun = given.lstrip(WHITESPACE)
        if "\n" in begun.rstrip(WHITESPACE) or len(begun) > _MAX_NAME_CHARS:
            return Reading.BAD, 0
        if not mark:
            return None, 0
        name, call_id = self._form.name_and_id(begun.strip(WHITESPACE))
        if not name:
            return Reading.BAD, 0
        self._called = name, call_id
        self._state = self._between
        return None, at + (0 if mark == "{" else len(mark))

    def _between(self, text: str) -> tuple[Reading | None, int]:
        """Up to the brace that begins the arguments."""
        at = text.find("{", 0, _MOST_BETWEEN)
        if at < 0:
            return (Reading.BAD if len(text) >= _MOST_BETWEEN else None), 0
        filling = _FENCE.sub("", text[:at]) if self._form.fenced else text[:at]
        if self._form.between in filling:
            filling = filling.partition(self._form.between)[2] if self._form.between else filling
        if filling.strip(WHITESPACE):
            return Reading.BAD, 0
        self.sink.begin(*self._called)
        self.in_arguments = True
        self._state = self._arguments
        return None, at

    def _arguments(self, text: str) -> tuple[Reading | None, int]:
        used = self._reader.feed(text)
        self.sink.arguments(self._reader.text)
        self._reader.text = ""
        if self._reader.bad:
            return Reading.BAD, used
        if self._reader.done:
            self.in_arguments = False
            self._state = self._end
        return None, used

    def _end(self, text: str) -> tuple[Reading | None, int]:
        if not self._form.end:
            return Reading.DONE, 0
        at, mark = first_mark(text, (self._form.end,))
        filling = text[:at].strip("`" + WHITESPACE if self._form.fenced else WHITESPACE)
        if filling:
            # Neither the end mark nor filling: the call is complete, the rest is left to others.
            return Reading.DONE, 0
        return (Reading.DONE, at + len(mark)) if mark else (None, 0)

    def close(self, text: str) -> bool:
        return self._state == self._end
