"""One answer on its way to the client: text and ids in; reasoning, content and tool calls out.

    plan = parsers.plan(request)              once per request; checks it, lets the parsers adjust it
    plan.saw_prompt(prompt_token_ids)
    reader = plan.reader()                    once per answer
    reader.feed(text, token_ids) ...          fragments for a stream, then reader.finish()
    reader.whole(text, token_ids)             or the whole at once

Every API that answers with messages uses these three; what they give is in OpenAI's shape.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hardpoint.contracts.reasoning_parser import ReasoningParser
from hardpoint.contracts.tool_parser import ToolParser
from hardpoint.errors import ConfigError, EngineGenerateError, VLLMValidationError
from hardpoint.extensions.faults import leave_out
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.registry import registry
from hardpoint.front_end.parsers.forced_calls import NamedCallParser, RequiredCallParser
from hardpoint.front_end.parsers.tool_choice import ToolChoice, ToolMode, choice_of, narrowed
from hardpoint.front_end.parsers.tool_facts import is_strict
from hardpoint.log import init_logger
from hardpoint.types.answers import DeltaMessage, DeltaToolCall, ToolCall, new_call_id
from hardpoint.types.sampling_params import StructuredOutputsParams

logger = init_logger(__name__)


@dataclass
class Answer:
    """A whole answer."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)


@contextmanager
def blaming(key: str, name: str) -> Iterator[None]:
    """What the block raises is the fault of a parser: the request ends with an error that names it."""
    try:
        yield
    except VLLMValidationError:
        raise
    except Exception as error:
        what = f"the {key.removesuffix('s').replace('_', ' ')} {name!r} failed: {type(error).__name__}: {error}"
        entry = registry(key).get(name)
        origin = entry.origin if entry is not None else None
        logger.error("%s\n%s", what, "".join(traceback.format_exception(error)))
        fix = leave_out(origin) if origin is not None else ""
        ledger.record("fault", key, name, origin=origin, detail=what, fix=fix)
        raise EngineGenerateError(what, code="parser", origin=origin.label if origin else "") from error


@dataclass(frozen=True)
class Parsers:
    """What a server reads answers with.

    auto  whether requests may leave it to the model to call tools
    """

    tokenizer: Any
    model_config: Any = None
    tool_name: str = ""
    tool_class: type[ToolParser] | None = None
    reasoning_name: str = ""
    reasoning_class: type[ReasoningParser] | None = None
    auto: bool = False

    def __post_init__(self) -> None:
        if self.auto and self.tool_class is None:
            raise ConfigError(
                "--enable-auto-tool-choice needs a parser",
                code="flag-missing",
                fix=f"add --tool-call-parser NAME; there are {', '.join(sorted(registry('tool_parsers').names()))}",
            )

    def plan(self, request: Any, template_kwargs: dict[str, Any] | None = None) -> AnswerPlan:
        """How to read the answers to a request, which is copied where the parsers change it.

        request          has tools, tool_choice, parallel_tool_calls, include_reasoning, structured_outputs,
                         response_format and skip_special_tokens
        template_kwargs  what the chat template gets beside the messages

        Raises VLLMValidationError for a choice that cannot be honoured.
        """
        request = narrowed(request)
        choice = choice_of(request)
        if choice.mode is ToolMode.AUTO and not self.auto:
            raise VLLMValidationError(
                'tool_choice "auto" needs a server started with --enable-auto-tool-choice and --tool-call-parser',
                parameter="tool_choice",
            )
        if self.reasoning_class is None and choice.mode is ToolMode.NONE:
            return AnswerPlan(self, request, choice, {})
        plan = AnswerPlan(self, request.model_copy(), choice, dict(template_kwargs or {}))
        plan.adjust()
        return plan


class AnswerPlan:
    """How the answers to one request are read. `request` is the one that runs."""

    def __init__(self, parsers: Parsers, request: Any, choice: ToolChoice, template_kwargs: dict[str, Any]) -> None:
        self.request = request
        self.choice = choice
        self._parsers = parsers
        self._template_kwargs = template_kwargs
        self._prompt: list[int] = []
        self._make_tool_parser: Callable[[], ToolParser] | None = None

    @property
    def reads_nothing(self) -> bool:
        """Whether an answer's text is its content."""
        return self._make_tool_parser is None and self._parsers.reasoning_class is None

    @property
    def tool_name(self) -> str:
        """The name of the server's tool parser, or the choice that is read without it."""
        return self._parsers.tool_name or self.choice.mode.value

    @property
    def reasoning_name(self) -> str:
        """The name of the reasoning parser; empty without one."""
        return self._parsers.reasoning_name

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """What the engine has to know about the reasoning of a request with structured output."""
        if self._parsers.reasoning_class is None:
            return {}
        return {"reasoning_parser_kwargs": {"chat_template_kwargs": self._template_kwargs}}

    def adjust(self) -> None:
        """Let the parsers change the request, and choose how calls are read."""
        self._adjust_for_tools()
        if self._parsers.reasoning_class is not None:
            with blaming("reasoning_parsers", self.reasoning_name):
                self.request = self.new_reasoning_parser().adjust_request(self.request)

    def _adjust_for_tools(self) -> None:
        if self.choice.mode is ToolMode.NONE:
            return
        own, tokenizer, tools = self._parsers.tool_class or ToolParser, self._parsers.tokenizer, self.request.tools
        before = self.request.structured_outputs
        strict = [i for i, tool in enumerate(tools) if is_strict(tool)] if self.choice.mode is ToolMode.AUTO else []
        if strict:
            self._hold_to_schemas(own(tokenizer, tools), f"tools.{strict[0]}.function.strict")
        with blaming("tool_parsers", self.tool_name):
            self.request = own(tokenizer, tools).adjust_request(self.request)
        # Where the parser left the answer to be written in the model's own format, it reads it, too.
        constrained = self.request.structured_outputs is not before
        if self.choice.mode is ToolMode.REQUIRED and constrained:
            self._make_tool_parser = lambda: RequiredCallParser(tokenizer, tools)
        elif self.choice.mode is ToolMode.NAMED and constrained:
            self._make_tool_parser = lambda: NamedCallParser(tokenizer, tools, self.choice.named)
        else:
            self._make_tool_parser = lambda: own(tokenizer, tools)

    def _hold_to_schemas(self, parser: ToolParser, place: str) -> None:
        """Have calls that the model makes by itself satisfy their schemas, as `strict` asks."""
        if self.request.structured_outputs is not None or _binds(self.request.response_format):
            raise VLLMValidationError(
                "a strict tool and a format for the answer exclude each other, unless tool_choice demands the call",
                parameter=place,
            )
        with blaming("tool_parsers", self.tool_name):
            tag = parser.get_structural_tag(self.request)
        if tag is None:
            raise VLLMValidationError(
                f"strict is not supported by this server: calls in the format {self.tool_name!r} cannot be held to a "
                "schema, unless tool_choice demands one",
                parameter=place,
            )
        self.request.structured_outputs = StructuredOutputsParams(structural_tag=_as_text(tag))

    @property
    def binds_calls(self) -> bool:
        """Whether the schemas of tools bind the answer."""
        return isinstance(self.request.structured_outputs, StructuredOutputsParams)

    def saw_prompt(self, token_ids: Sequence[int]) -> None:
        """The prompt as it was rendered."""
        self._prompt = list(token_ids)

    def new_reasoning_parser(self) -> ReasoningParser:
        """A parser for one answer."""
        assert self._parsers.reasoning_class is not None
        arguments = {"chat_template_kwargs": self._template_kwargs, "model_config": self._parsers.model_config}
        return self._parsers.reasoning_class(self._parsers.tokenizer, **arguments)

    def reader(self) -> AnswerReader:
        """A reader for one answer."""
        reasoning = tool = None
        if self._parsers.reasoning_class is not None:
            with blaming("reasoning_parsers", self.reasoning_name):
                reasoning = self.new_reasoning_parser()
                reasoning.adjust_initial_state_from_prompt(self._prompt)
        if self._make_tool_parser is not None:
            with blaming("tool_parsers", self.tool_name):
                tool = self._make_tool_parser()
        return AnswerReader(self, reasoning, tool, self._prompt)


class AnswerReader:
    """Reads one answer, whole or in pieces.

    called_tools  whether it has called any so far
    """

    def __init__(
        self, plan: AnswerPlan, reasoning: ReasoningParser | None, tool: ToolParser | None, prompt: list[int]
    ) -> None:
        self.called_tools = False
        self._plan = plan
        self._reasoning = reasoning
        self._tool = tool
        self._text, self._ids = "", list[int]()
        self._content, self._content_ids = "", list[int]()
        self._begun: set[int] = set()
        self._prompt = prompt
        self._in_prompt: bool | None = None

    # -- in pieces --------------------------------------------------------------------------------

    def feed(self, text: str, token_ids: Sequence[int]) -> DeltaMessage | None:
        """The next piece; what it adds to the message, None while that is not known."""
        if self._reasoning is None or self._reasoning_is_in_prompt:
            self._ids += token_ids
            return self._sendable(self._read_content(text, token_ids))
        before, ids_before = self._text, list(self._ids)
        self._text += text
        self._ids += token_ids
        with blaming("reasoning_parsers", self._plan.reasoning_name):
            delta = self._reasoning.extract_reasoning_streaming(
                before, self._text, text, ids_before, self._ids, token_ids
            )
        return self._sendable(self._with_calls(delta, token_ids))

    def finish(self) -> DeltaMessage | None:
        """The answer is over; what was held back."""
        found = None
        if self._reasoning is not None and not self._reasoning_is_in_prompt:
            with blaming("reasoning_parsers", self._plan.reasoning_name):
                found = self._reasoning.finish_streaming()
        message = self._with_calls(found, ())
        if self._tool is not None:
            with blaming("tool_parsers", self._plan.tool_name):
                message = merged(message, self._tool.finish_streaming())
                rest = self._tool.get_remaining_unstreamed_args()
            if rest and self._begun:
                message = merged(message, _more_arguments(max(self._begun), rest))
        return self._sendable(message)

    @property
    def _reasoning_is_in_prompt(self) -> bool:
        """Whether the prompt has ended the reasoning already."""
        if self._in_prompt is None:
            assert self._reasoning is not None
            with blaming("reasoning_parsers", self._plan.reasoning_name):
                self._in_prompt = bool(self._prompt) and bool(self._reasoning.is_reasoning_end(self._prompt))
        return self._in_prompt

    def _with_calls(self, delta: DeltaMessage | None, token_ids: Sequence[int]) -> DeltaMessage | None:
        """What the reasoning parser found, with the calls taken out of its content."""
        if delta is None or not delta.content:
            return delta
        content = self._read_content(delta.content, token_ids)
        thought = DeltaMessage(reasoning=delta.thought) if delta.thought else None
        return merged(thought, content)

    def _read_content(self, text: str, token_ids: Sequence[int]) -> DeltaMessage | None:
        if self._tool is None:
            return DeltaMessage(content=text) if text else None
        before, ids_before = self._content, list(self._content_ids)
        self._content += text
        self._content_ids += token_ids
        if not text and not token_ids:
            return None
        with blaming("tool_parsers", self._plan.tool_name):
            return self._tool.extract_tool_calls_streaming(
                before, self._content, text, ids_before, self._content_ids, token_ids, self._plan.request
            )

    def _sendable(self, message: DeltaMessage | None) -> DeltaMessage | None:
        """The message as the request wants it."""
        if message is None:
            return None
        reasoning = message.thought if self._plan.request.include_reasoning else None
        calls = [self._complete(call) for call in message.tool_calls if self._wanted(call.index)]
        if not (reasoning or message.content or calls):
            return None
        return DeltaMessage(reasoning=reasoning or None, content=message.content or None, tool_calls=calls)

    def _wanted(self, index: int) -> bool:
        return index == 0 or self._plan.request.parallel_tool_calls is not False

    def _complete(self, call: DeltaToolCall) -> DeltaToolCall:
        """The first fragment of a call always has an id and a type."""
        if call.index in self._begun:
            return call
        self._begun.add(call.index)
        self.called_tools = True
        return call.model_copy(update={"id": call.id or new_call_id(), "type": call.type or "function"})

    # -- at once ----------------------------------------------------------------------------------

    def whole(self, text: str, token_ids: Sequence[int]) -> Answer:
        """The whole answer."""
        self._ids = list(token_ids)
        answer = Answer(content=text)
        if self._reasoning is not None:
            with blaming("reasoning_parsers", self._plan.reasoning_name):
                answer.reasoning, answer.content = self._reasoning.extract_reasoning(text, self._plan.request)
        if self._tool is not None and answer.content:
            with blaming("tool_parsers", self._plan.tool_name):
                found = self._tool.extract_tool_calls(answer.content, self._plan.request)
            if found.tools_called:
                answer.tool_calls = found.tool_calls if self._wanted(1) else found.tool_calls[:1]
                answer.content = found.content
            else:
                # A parser may have changed the content, such as taken marks out of it.
                answer.content = found.content or answer.content
            self.called_tools = bool(answer.tool_calls)
        if not self._plan.request.include_reasoning:
            answer.reasoning = None
        if self._reasoning is not None or self.called_tools:
            answer.content = answer.content or None
        return answer

    # -- about it ---------------------------------------------------------------------------------

    def finish_reason(self, reason: str) -> str:
        """Why the answer ended, as OpenAI puts it: a model that stops behind its calls waits for their results."""
        ends_with_calls = self.called_tools and reason == "stop" and self._plan.choice.mode is not ToolMode.NAMED
        return "tool_calls" if ends_with_calls else reason

    def reasoning_tokens(self) -> int | None:
        """How many of the answer's tokens are reasoning; None without a reasoning parser."""
        if self._reasoning is None:
            return None
        with blaming("reasoning_parsers", self._plan.reasoning_name):
            return self._reasoning.count_reasoning_tokens(self._ids)


def _binds(response_format: Any) -> bool:
    return response_format is not None and response_format.get("type") != "text"


def _as_text(tag: Any) -> str:
    """A parser's tag as the JSON that travels to the engine."""
    if isinstance(tag, str):
        return tag
    return json.dumps(tag) if isinstance(tag, dict) else str(tag.model_dump_json())


def _more_arguments(index: int, text: str) -> DeltaMessage:
    return DeltaMessage(tool_calls=[DeltaToolCall.model_validate({"index": index, "function": {"arguments": text}})])


def merged(one: DeltaMessage | None, other: DeltaMessage | None) -> DeltaMessage | None:
    """Two fragments as one."""
    if one is None or other is None:
        return one or other
    return DeltaMessage(
        reasoning=((one.thought or "") + (other.thought or "")) or None,
        content=((one.content or "") + (other.content or "")) or None,
        tool_calls=[*one.tool_calls, *other.tool_calls],
    )
