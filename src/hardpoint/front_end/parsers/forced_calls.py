"""Answers that had to be calls: JSON alone, whatever format the model was trained on."""

from __future__ import annotations

from typing import Any

from hardpoint.contracts.tool_parser import Tool
from hardpoint.front_end.parsers.calls import ArgumentText, CallBegun, CallFormat, Event
from hardpoint.front_end.parsers.format_parser import FormatToolParser
from hardpoint.front_end.parsers.json_calls import JsonCalls
from hardpoint.types.answers import new_call_id


class RequiredCallParser(FormatToolParser):
    """A list of `{"name": ..., "parameters": {...}}`."""

    format = CallFormat(JsonCalls(), at_start=("[", "{"))


class NamedCallParser(FormatToolParser):
    """The arguments of one function."""

    def __init__(self, tokenizer: Any, tools: list[Tool] | None, name: str) -> None:
        self._function = name
        super().__init__(tokenizer, tools)

    def make_scanner(self) -> Any:
        """A fresh reader of one answer."""
        return _ArgumentsOnly(self._function)


class _ArgumentsOnly:
    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        if text and self._name is not None:
            events.append(CallBegun(self._name, new_call_id()))
            self._name = None
        return [*events, ArgumentText(text)] if text else events

    def close(self) -> list[Event]:
        return []
