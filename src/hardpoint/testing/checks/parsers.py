"""The suites for tool parsers and reasoning parsers: what a stream adds up to is what the whole answer gives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from hardpoint.contracts.reasoning_parser import ReasoningParser
from hardpoint.contracts.tool_parser import ToolParser
from hardpoint.front_end.parsers.answers import AnswerPlan, AnswerReader, Parsers
from hardpoint.front_end.parsers.tool_choice import ToolChoice, ToolMode
from hardpoint.testing.failures import explained, require, require_call, require_class, require_sync

_PIECES = "previous_text, current_text, delta_text, previous_token_ids, current_token_ids, delta_token_ids"
_TEXTS = ("", "Just words, with no call.", "Zwölf Bären, ☃ and 雪")
# With every place of a cut up to this length, with some of them beyond it.
_EVERY_PLACE_CHARS = 400


class _OneIdPerCharacter:
    """A tokenizer whose ids are code points."""

    all_special_ids: list[int] = []
    all_special_tokens: list[str] = []
    bos_token_id = eos_token_id = None

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(32, 127)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, token_ids))


def check_tool_parser(
    cls: Any, answers: Iterable[str], tools: list[dict[str, Any]] | None = None, tokenizer: Any = None
) -> None:
    """Read answers whole, and as streams cut at every place: the calls and the content must be the same.

    answers    texts as the model writes them, with calls and without; damaged ones, too
    tools      the request's tools, in OpenAI's form
    tokenizer  one id per character unless given
    """
    subject = require_class(cls, ToolParser)
    require_sync(cls, subject, "adjust_request", "extract_tool_calls", "extract_tool_calls_streaming")
    require_call(cls.__init__, subject, "__init__(self, tokenizer, tools=None)", None, None, None)
    require_call(cls.extract_tool_calls, subject, "extract_tool_calls(self, model_output, request)", None, "", None)
    shape = f"extract_tool_calls_streaming(self, {_PIECES}, request)"
    require_call(cls.extract_tool_calls_streaming, subject, shape, None, "", "", "", [], [], [], None)
    request = _request(tools or [{"type": "function", "function": {"name": "f"}}])
    parsers = Parsers(tokenizer or _OneIdPerCharacter(), tool_name=cls.__name__, tool_class=cls)
    _adjusted(cls, subject, parsers.tokenizer, request)
    plan = AnswerPlan(parsers, request, ToolChoice(ToolMode.AUTO), {})
    plan.adjust()
    _compare(plan, subject, answers)


def check_reasoning_parser(cls: Any, answers: Iterable[str], tokenizer: Any = None) -> None:
    """Read answers whole, and as streams cut at every place: reasoning and content must be the same.

    answers    texts as the model writes them, with reasoning and without, cut off ones, too
    tokenizer  one id per character unless given
    """
    subject = require_class(cls, ReasoningParser)
    require_sync(cls, subject, "is_reasoning_end", "extract_reasoning", "extract_reasoning_streaming")
    shape = "__init__(self, tokenizer, *args, **kwargs)"
    require_call(cls.__init__, subject, shape, None, None, chat_template_kwargs={}, model_config=None)
    require_call(cls.extract_reasoning, subject, "extract_reasoning(self, model_output, request)", None, "", None)
    shape = f"extract_reasoning_streaming(self, {_PIECES})"
    require_call(cls.extract_reasoning_streaming, subject, shape, None, "", "", "", [], [], [])
    tokenizer = tokenizer or _OneIdPerCharacter()
    parsers = Parsers(tokenizer, reasoning_name=cls.__name__, reasoning_class=cls)
    plan = AnswerPlan(parsers, _request(None), ToolChoice(ToolMode.NONE), {})
    plan.adjust()
    for answer in answers:
        with explained(subject, f"is_reasoning_end for {answer!r}", "it takes the ids of a prompt or an answer"):
            over = plan.new_reasoning_parser().is_reasoning_end(tokenizer.encode(answer))
        require(isinstance(over, bool), subject, f"is_reasoning_end returns {over!r}", "return True or False")
    _compare(plan, subject, answers)


def _request(tools: list[dict[str, Any]] | None) -> Any:
    return SimpleNamespace(
        tools=tools, tool_choice="auto" if tools else None, parallel_tool_calls=True, include_reasoning=True,
        structured_outputs=None, response_format=None, skip_special_tokens=True, vllm_xargs=None,
    )  # fmt: skip


def _adjusted(cls: Any, subject: str, tokenizer: Any, request: Any) -> None:
    with explained(subject, "adjust_request", "it returns the request, changed or not"):
        adjusted = cls(tokenizer, request.tools).adjust_request(request)
    require(adjusted is not None, subject, "adjust_request returns None", "return the request")


def _compare(plan: AnswerPlan, subject: str, answers: Iterable[str]) -> None:
    for answer in (*_TEXTS, *answers):
        with explained(subject, f"reading {answer!r}", "what cannot be read is content, never an error"):
            whole = _whole(plan.reader(), answer)
            for cuts in _cuts(answer):
                streamed = _streamed(plan.reader(), answer, cuts)
                require(
                    streamed == whole,
                    subject,
                    f"{answer!r}, cut at {cuts}, gives {streamed}, and at once {whole}",
                    "decide by the text alone, hold back what may be the beginning of a mark, "
                    "and give it back in finish_streaming",
                )


def _cuts(answer: str) -> Iterator[list[int]]:
    """Where to cut: everywhere at once, and once at every place."""
    yield list(range(len(answer) + 1))
    step = max(1, len(answer) // _EVERY_PLACE_CHARS)
    yield from ([place] for place in range(0, len(answer) + 1, step))


def _whole(reader: AnswerReader, answer: str) -> tuple[str, str, list[tuple[str, str]]]:
    found = reader.whole(answer, [ord(char) for char in answer])
    calls = [(call.function.name, call.function.arguments) for call in found.tool_calls]
    return found.reasoning or "", found.content or "", calls


def _streamed(reader: AnswerReader, answer: str, cuts: list[int]) -> tuple[str, str, list[tuple[str, str]]]:
    reasoning = content = ""
    calls: list[list[str]] = []
    edges = [0, *cuts, len(answer)]
    pieces = [answer[begin:end] for begin, end in pairwise(edges)]
    for delta in (*(reader.feed(piece, [ord(char) for char in piece]) for piece in pieces), reader.finish()):
        if delta is None:
            continue
        reasoning += delta.reasoning or ""
        content += delta.content or ""
        for call in delta.tool_calls:
            if call.index == len(calls):
                calls.append(["", ""])
            calls[call.index][0] += (call.function and call.function.name) or ""
            calls[call.index][1] += (call.function and call.function.arguments) or ""
    return reasoning, content, [(name, arguments) for name, arguments in calls]
