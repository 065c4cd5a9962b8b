"""Calls written as Python: `[f(a=1), g(b="x")]`. They are parsed, never run."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hardpoint.front_end.parsers.calls import Body, Reading, Sink
from hardpoint.front_end.parsers.json_text import WHITESPACE

_MAX_CALL_CHARS = 1 << 18
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_PAIRS = {")": "(", "]": "[", "}": "{"}


class _NotACall(ValueError):
    """The text is no call with literal keyword arguments."""


def read_call(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of one call; raises ValueError for anything else."""
    tree = _parsed(text)
    if not isinstance(tree, ast.Call) or tree.args:
        raise _NotACall("no call with keyword arguments only")
    try:
        return _dotted(tree.func), {_key(keyword): _value(keyword.value) for keyword in tree.keywords}
    except RecursionError as error:
        raise _NotACall(str(error)) from None


def read_literal(text: str) -> Any:
    """A number, text, list or dict as Python writes it; raises ValueError for anything else."""
    try:
        return _value(_parsed(text))
    except RecursionError as error:
        raise _NotACall(str(error)) from None


def _parsed(text: str) -> ast.expr:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in the model's strings
            return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise _NotACall(str(error)) from None


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise _NotACall("a function is called by its name")


def _key(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise _NotACall("no argument may be unpacked")
    return keyword.arg


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {_text_key(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = _value(node.operand)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number if isinstance(node.op, ast.USub) else number
    raise _NotACall("arguments are literals")


def _text_key(node: ast.expr | None) -> str:
    key = None if node is None else _value(node)
    if not isinstance(key, str):
        raise _NotACall("keys are texts")
    return key


@dataclass(frozen=True)
class PythonicCalls:
    """Calls in a list, or one per line up to an end mark.

    ends   marks behind the calls; without any, the list's bracket ends them
    lines  the calls stand without a list
    """

    ends: tuple[str, ...] = ()
    lines: bool = False

    def __call__(self, sink: Sink, tools: Sequence[object], mark: str) -> Body:
        """The reader of one part."""
        return _PythonicBody(self, sink, tools)


class _PythonicBody(Body):
    def __init__(self, form: PythonicCalls, sink: Sink, tools: Sequence[object]) -> None:
        super().__init__(sink, tools)
        self._form = form
        self._in_list = form.lines
        self._list_over = False
        self._scan = _CallEnd()

    def feed(self, text: str) -> tuple[Reading, int]:
        at = 0
        while True:
            while not self._scan.begun and not self._over and at < len(text) and self._passes(text[at]):
                at += 1
            if self._over:
                return Reading.DONE, at
            if not self._scan.begun:
                if at == len(text):
                    return Reading.MORE, at
                if self._list_over or not self._in_list or not (text[at].isidentifier()):
                    return self._leave(text, at)
            end = self._scan.find(text, at)
            if end < 0:
                return (Reading.BAD if self._scan.bad else Reading.MORE), at
            if not self._emit(text[at:end]):
                return Reading.BAD, at
            at, self._scan = end, _CallEnd()

    @property
    def _over(self) -> bool:
        """Whether nothing that follows belongs to the part."""
        return self._list_over and not self._form.ends

    def _passes(self, char: str) -> bool:
        if char == "[" and not self._in_list:
            self._in_list = True
        elif char == "]" and self._in_list and not self._list_over and (self.sink.begun or self._form.lines):
            self._list_over = not self._form.lines
        elif char == "[" and self._form.lines and not self.sink.begun:
            return True
        else:
            return char in WHITESPACE or (char in ",;" and bool(self.sink.begun))
        return True

    def _emit(self, text: str) -> bool:
        try:
            name, arguments = read_call(text)
            dumped = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except ValueError:
            return False
        self.sink.begin(name)
        self.sink.arguments(dumped)
        return True

    def _leave(self, text: str, at: int) -> tuple[Reading, int]:
        here = text[at:]
        outcome = Reading.DONE if self.sink.begun else Reading.BAD
        for mark in self._form.ends:
            if here.startswith(mark):
                return outcome, at + len(mark)
        if any(mark.startswith(here) for mark in self._form.ends):
            return Reading.MORE, at
        return outcome, at

    def close(self, text: str) -> bool:
        return bool(self.sink.begun) and not self._scan.begun


class _CallEnd:
    """Finds the closing bracket of one call, past strings and nested brackets; remembers how far it looked."""

    def __init__(self) -> None:
        self.begun = False
        self.bad = False
        self._looked = 0
        self._open: list[str] = []
        self._quote = ""
        self._escaped = False

    def find(self, text: str, start: int) -> int:
        """The place behind the call that begins at `start`; -1 when it is not there (yet)."""
        self.begun = True
        at = start + self._looked
        while at < len(text) and not self.bad:
            closed = self._look(text[at])
            at += 1
            if closed:
                return at
        self._looked = at - start
        self.bad = self.bad or self._looked > _MAX_CALL_CHARS
        return -1

    def _look(self, char: str) -> bool:
        if self._quote:
            if self._escaped or char == "\\":
                self._escaped = not self._escaped
            elif char == self._quote:
                self._quote = ""
            return False
        if not self._open and char != "(":
            # Still the function's name.
            self.bad = not (char.isalnum() or char in "_. \t")
            return False
        if char in "\"'":
            self._quote = char
        elif char in "([{":
            self._open.append(char)
        elif char in ")]}":
            self.bad = not self._open or self._open.pop() != _PAIRS[char]
            return not self._open and not self.bad
        return False
