"""The tool parsers we ship: a contract in front of the shared machine, and a format each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from hardpoint.contracts.tool_parser import Tool, ToolParser
from hardpoint.front_end.parsers.calls import CallBegun, CallFormat, CallScanner, Content, Event
from hardpoint.front_end.parsers.tool_facts import is_strict, schema_of_arguments, tool_name
from hardpoint.types.answers import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)


class FormatToolParser(ToolParser):
    """Reads the calls of one `format`."""

    engine_based_streaming: ClassVar[bool] = True
    format: ClassVar[CallFormat]

    def __init__(self, tokenizer: Any, tools: list[Tool] | None = None) -> None:
        super().__init__(tokenizer, tools)
        self._scanner = self.make_scanner()

    def make_scanner(self) -> Any:
        """A fresh reader of one answer: `feed(text)` and `close()` give events."""
        return CallScanner(self.format, self.tools or ())

    def written_marks(self) -> Sequence[str]:
        """The texts that must be visible for calls to be found."""
        return self.format.written

    def adjust_request(self, request: Any) -> Any:
        """As the contract; special tokens are kept in the text where the format is written with them."""
        request = super().adjust_request(request)
        special = set(getattr(self.model_tokenizer, "all_special_tokens", ()))
        if request.tools and request.tool_choice != "none" and special.intersection(self._mark_tokens()):
            request.skip_special_tokens = False
        return request

    def get_structural_tag(self, request: Any, *, reasoning: bool = False, strict_level: Any = None) -> str | None:
        """Text in which whatever begins as a call is one, with the arguments of strict tools held to their schemas.

        None where the format says no fixed text around arguments, or its marks are tokens without a text of their own,
        which no grammar can ask for.
        """
        frame, special = self.format.frame, set(getattr(self.model_tokenizer, "all_special_tokens", ()))
        if frame is None or any(token and token in frame.begin + frame.end for token in special):
            return None
        structures = []
        for tool in request.tools:
            schema = schema_of_arguments(tool) if is_strict(tool) else {"type": "object"}
            begin = frame.begin.replace("{name}", json.dumps(tool_name(tool), ensure_ascii=False))
            structures.append({"begin": begin, "schema": schema, "end": frame.end})
        tag = {"type": "structural_tag", "structures": structures, "triggers": [self.format.marks[0]]}
        return json.dumps(tag)

    def _mark_tokens(self) -> set[str]:
        """Marks, and the tags that longer marks begin with."""
        return {mark for mark in self.written_marks()} | {f"{mark.partition('>')[0]}>" for mark in self.written_marks()}

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """The calls and the content of a whole answer."""
        scanner = self.make_scanner()
        return _whole([*scanner.feed(model_output), *scanner.close()])

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
        """What the next piece of a stream adds."""
        return self._delta(self._scanner.feed(delta_text))

    def finish_streaming(self) -> DeltaMessage | None:
        """What was held back."""
        return self._delta(self._scanner.close())

    def _delta(self, events: Iterable[Event]) -> DeltaMessage | None:
        content, calls = "", list[DeltaToolCall]()
        for event in events:
            if isinstance(event, Content):
                content += event.text
            elif isinstance(event, CallBegun):
                self.current_tool_id += 1
                self.prev_tool_call_arr.append({"name": event.name, "arguments": ""})
                self.streamed_args_for_tool.append("")
                called = DeltaFunctionCall(name=event.name, arguments="")
                calls.append(DeltaToolCall(index=self.current_tool_id, id=event.id, type="function", function=called))
            else:
                self._add_arguments(event.text, calls)
        if not content and not calls:
            return None
        return DeltaMessage(content=content or None, tool_calls=calls)

    def _add_arguments(self, text: str, calls: list[DeltaToolCall]) -> None:
        self.streamed_args_for_tool[-1] += text
        self.prev_tool_call_arr[-1]["arguments"] += text
        last = calls[-1] if calls else None
        if last is not None and last.function is not None and last.function.name is None:
            last.function.arguments = (last.function.arguments or "") + text
        else:
            # The first fragment has id and name and no arguments, the next ones have arguments only.
            calls.append(DeltaToolCall(index=self.current_tool_id, function=DeltaFunctionCall(arguments=text)))


def _whole(events: Iterable[Event]) -> ExtractedToolCallInformation:
    content, calls = "", list[ToolCall]()
    for event in events:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, CallBegun):
            calls.append(ToolCall(id=event.id, function=FunctionCall(name=event.name, arguments="")))
        else:
            calls[-1].function.arguments += event.text
    return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=content or None)
