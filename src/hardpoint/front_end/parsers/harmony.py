"""gpt-oss's answers: messages in channels. Analysis is reasoning, final is content, a message to a function a call.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hardpoint.contracts.reasoning_parser import ReasoningParser
from hardpoint.front_end.parsers.calls import ArgumentText, CallBegun, Content, Event, first_mark
from hardpoint.front_end.parsers.format_parser import FormatToolParser
from hardpoint.types.answers import DeltaMessage, new_call_id

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_MARKS = (_START, _CHANNEL, _MESSAGE, *_ENDS)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the analysis channel."""

    text: str


@dataclass(frozen=True, slots=True)
class Raw:
    """A message to a function as the model wrote it, mark by mark."""

    text: str


class HarmonyScanner:
    """Reads one answer.

    raw_calls  messages to functions come as Raw, for a parser that reads them, and not as calls
    """

    def __init__(self, raw_calls: bool = False) -> None:
        self._raw_calls = raw_calls
        self._text = ""
        self._header: str | None = None
        self._kind: type[Any] = Content

    def feed(self, text: str) -> list[Any]:
        """More of the answer; what it makes certain."""
        self._text += text
        events: list[Any] = []
        while True:
            at, mark = first_mark(self._text, _MARKS)
            self._take(self._text[:at], events)
            self._text = self._text[at + len(mark) :]
            if not mark:
                return events
            self._pass(mark, events)

    def close(self) -> list[Any]:
        """The answer is over."""
        events: list[Any] = []
        self._take(self._text, events)
        self._text = ""
        return events

    def _take(self, text: str, events: list[Any]) -> None:
        if not text:
            return
        if self._header is not None:
            self._header += text
        else:
            events.append(self._kind(text))

    def _pass(self, mark: str, events: list[Any]) -> None:
        if mark == _MESSAGE:
            self._begin(self._header or "", events)
            self._header = None
            return
        if mark in _ENDS:
            if self._kind is Raw:
                events.append(Raw(mark))
            # Behind a message only the next header may come.
            self._header, self._kind = "", Content
            return
        self._header = mark if mark == _START or self._header is None else self._header + mark

    def _begin(self, header: str, events: list[Any]) -> None:
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            if self._raw_calls:
                self._kind = Raw
                events.append(Raw(header + _MESSAGE))
            else:
                self._kind = ArgumentText
                events.append(CallBegun(recipient[1].partition("<")[0], new_call_id()))
            return
        channel = header.rpartition(_CHANNEL)[2].strip()
        self._kind = Reasoning if channel.startswith("analysis") else Content


class HarmonyToolParser(FormatToolParser):
    """Calls of gpt-oss; analysis that no reasoning parser took out is left out."""

    def make_scanner(self) -> Any:
        """A fresh reader of one answer."""
        return _CallsOnly()

    def written_marks(self) -> Sequence[str]:
        """The texts that must be visible for calls to be found."""
        return _MARKS


class _CallsOnly:
    def __init__(self) -> None:
        self._scanner = HarmonyScanner()

    def feed(self, text: str) -> list[Event]:
        return [event for event in self._scanner.feed(text) if not isinstance(event, Reasoning)]

    def close(self) -> list[Event]:
        return [event for event in self._scanner.close() if not isinstance(event, Reasoning)]


class GptOssReasoningParser(ReasoningParser):
    """The analysis channel of gpt-oss is reasoning; messages to functions stay as they are, for the tool parser."""

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self._scanner = HarmonyScanner(raw_calls=True)

    @property
    def reasoning_start_str(self) -> str:
        """What begins the reasoning."""
        return "<|channel|>analysis<|message|>"

    @property
    def reasoning_end_str(self) -> str:
        """What begins the answer."""
        return "<|channel|>final<|message|>"

    def adjust_request(self, request: Any) -> Any:
        """Keep the marks in the text."""
        request.skip_special_tokens = False
        return request

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether the last message is the final one."""
        return self._final_at(self.model_tokenizer.decode(list(input_ids[-4096:]))) >= 0

    def _final_at(self, text: str) -> int:
        """Where the text of a final message begins, in the last message; -1 when that is another."""
        last = text.rpartition(_START)[2] if _START in text else text
        found = re.search(r"<\|channel\|>\s*final\b[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>", last)
        return -1 if found is None else len(text) - len(last) + found.end()

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """The ids of the final message so far."""
        for place in range(len(input_ids)):
            if self._final_at(self.model_tokenizer.decode(list(input_ids[: place + 1]))) >= 0:
                return list(input_ids[place + 1 :])
        return []

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """The reasoning and the rest of a whole answer."""
        scanner = HarmonyScanner(raw_calls=True)
        reasoning, content = _split([*scanner.feed(model_output), *scanner.close()])
        return reasoning or None, content or None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """What the next piece of a stream adds."""
        return _message(self._scanner.feed(delta_text))

    def finish_streaming(self) -> DeltaMessage | None:
        """What was held back."""
        return _message(self._scanner.close())


def _split(events: list[Any]) -> tuple[str, str]:
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    return reasoning, "".join(event.text for event in events if not isinstance(event, Reasoning))


def _message(events: list[Any]) -> DeltaMessage | None:
    reasoning, content = _split(events)
    return DeltaMessage(reasoning=reasoning or None, content=content or None) if reasoning or content else None
