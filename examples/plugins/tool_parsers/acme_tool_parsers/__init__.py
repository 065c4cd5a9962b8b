"""A tool parser for a format of our own, registered under a name by a general plugin."""

import json
from collections.abc import Sequence
from typing import Any

from hardpoint.contracts.tool_parser import ToolParser
from hardpoint.extensions.parser_managers import ToolParserManager
from hardpoint.types.answers import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)


def read_line(line: str) -> tuple[str, str] | None:
    """The function and its arguments; None for a line that is no call."""
    name, _, arguments = line.strip().partition(" ")
    try:
        is_call = name.startswith("!") and isinstance(json.loads(arguments), dict)
    except ValueError:
        return None
    return (name[1:], arguments) if is_call else None


class AcmeToolParser(ToolParser):
    """A line `!weather {"city": "Oslo"}` is a call. A stream keeps a line until it is complete."""

    def __init__(self, tokenizer: Any, tools: Any = None) -> None:
        super().__init__(tokenizer, tools)
        self._line = ""

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """The calls and the content of a whole answer."""
        lines = model_output.splitlines(keepends=True)
        calls = [
            ToolCall(function=FunctionCall(name=found[0], arguments=found[1]))
            for found in map(read_line, lines)
            if found
        ]
        content = "".join(line for line in lines if read_line(line) is None)
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=content or None)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        """What the lines that are complete by now add."""
        lines = (self._line + delta_text).splitlines(keepends=True)
        self._line = "" if not lines or lines[-1].endswith("\n") else lines.pop()
        return self._message(lines)

    def finish_streaming(self) -> DeltaMessage | None:
        """The last line, which no line break ends."""
        lines, self._line = [self._line], ""
        return self._message(lines)

    def _message(self, lines: list[str]) -> DeltaMessage | None:
        content, calls = "", []
        for line in lines:
            found = read_line(line)
            if found is None:
                content += line
                continue
            self.current_tool_id += 1
            function = DeltaFunctionCall(name=found[0], arguments=found[1])
            calls.append(DeltaToolCall(index=self.current_tool_id, function=function))
        return DeltaMessage(content=content or None, tool_calls=calls) if content or calls else None


def register() -> None:
    """The general plugin: it runs in every process, and imports nothing heavy."""
    ToolParserManager.register_module("acme", module=AcmeToolParser)
