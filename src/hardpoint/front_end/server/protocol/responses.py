"""Bodies of /v1/responses: https://platform.openai.com/docs/api-reference/responses."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from hardpoint.errors import VLLMValidationError
from hardpoint.front_end.server.field_names import FieldNames, Place
from hardpoint.front_end.server.protocol.base import RequestBody, UsageInfo, check_metadata, random_id
from hardpoint.front_end.server.protocol.chat import MAX_MESSAGES, ChatCompletionRequest, check_tool_names
from hardpoint.front_end.server.refusals import RESPONSES, FieldRules

_ROLES = ("system", "developer", "user", "assistant")
_TEXTS = ("input_text", "output_text", "text")
# What a chat request calls it -> what we do; the more special ones first.
_NAMES = {
    "tools.*.function": "tools.*",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format.json_schema": "text.format.schema",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "image_url": "input_image",
}


def _input(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise VLLMValidationError("input must be a text or a non-empty list of items", parameter="input")
    if len(value) > MAX_MESSAGES:
        raise VLLMValidationError(f"input takes at most {MAX_MESSAGES} items, got {len(value)}", parameter="input")
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise VLLMValidationError("an item must be an object", parameter=f"input.{i}")
    return value


class ResponseFormat(RequestBody):
    """How a text is to be written."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    # Named so because `schema` is taken on every model.
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None
    description: str | None = None


class ResponseText(RequestBody):
    """What concerns the texts of an answer."""

    rules: ClassVar[FieldRules] = RESPONSES.inside("text")

    format: ResponseFormat | None = None
    verbosity: str | None = None


class ResponseReasoning(RequestBody):
    """How much the model thinks, and whether that is told in short."""

    rules: ClassVar[FieldRules] = RESPONSES.inside("reasoning")

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None


class ResponsesRequest(RequestBody):
    """A request for a response."""

    rules: ClassVar[FieldRules] = RESPONSES

    model: str | None = None
    input: Annotated[list[dict[str, Any]], BeforeValidator(_input)]
    instructions: str | None = None
    background: bool | None = False
    include: list[str] | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    max_tool_calls: int | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    previous_response_id: str | None = None
    prompt: dict[str, Any] | None = None
    reasoning: ResponseReasoning | None = None
    service_tier: str | None = None
    store: bool | None = None
    stream: bool | None = False
    temperature: float | None = None
    text: ResponseText | None = None
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]] | None = None
    top_logprobs: int | None = 0
    top_p: float | None = None
    top_k: int | None = None
    truncation: Literal["auto", "disabled"] | None = "disabled"
    user: str | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    priority: int = 0
    cache_salt: str | None = None
    request_id: str = Field(default_factory=lambda: f"resp_{random_id()}")
    include_reasoning: bool = True
    structured_outputs: dict[str, Any] | None = None
    skip_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _limits(self) -> ResponsesRequest:
        check_metadata(self.metadata)
        check_tool_names([tool.get("name") for tool in self.tools or ()], "tools.{}.name")
        return self

    def to_chat(self, before: list[dict[str, Any]]) -> tuple[ChatCompletionRequest, FieldNames]:
        """The same as a chat request, and what its fields are called here.

        before  messages of the responses this one continues

        Raises VLLMValidationError for what it cannot say.
        """
        system = (
            [({"role": "system", "content": self.instructions}, Place("instructions"))] if self.instructions else []
        )
        earlier = [(message, Place("previous_response_id")) for message in before]
        made = [*system, *earlier, *_placed_messages(self.input)]
        names = FieldNames(_NAMES, [place for _, place in made])
        with names.told():
            return self._as_chat([message for message, _ in made]), names

    def _as_chat(self, messages: list[dict[str, Any]]) -> ChatCompletionRequest:
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "stream": bool(self.stream or self.background),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "stop": self.stop,
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "request_id": self.request_id,
            "include_reasoning": self.include_reasoning,
            "structured_outputs": self.structured_outputs,
            "skip_special_tokens": self.skip_special_tokens,
            "chat_template_kwargs": self.chat_template_kwargs,
            "vllm_xargs": self.vllm_xargs,
            "response_format": self._response_format(),
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
            **self._tools(),
        }
        return ChatCompletionRequest(**{name: value for name, value in fields.items() if value is not None})

    def _response_format(self) -> dict[str, Any] | None:
        form = self.text.format if self.text is not None else None
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return {"type": "json_object"}
        if form.json_schema is None:
            raise VLLMValidationError("text.format of type json_schema needs a schema", parameter="text.format.schema")
        named = {"name": form.name or "answer", "schema": form.json_schema, "strict": form.strict}
        return {"type": "json_schema", "json_schema": named}

    def _tools(self) -> dict[str, Any]:
        if not self.tools:
            if self.tool_choice not in (None, "auto", "none"):
                raise VLLMValidationError("tool_choice needs tools", parameter="tool_choice")
            return {}
        return {
            "tools": [_function(tool, f"tools.{i}") for i, tool in enumerate(self.tools)],
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
        }

    def conversation(self) -> list[dict[str, Any]]:
        """The input as chat messages; neighbouring parts of one assistant turn become one message."""
        return messages_of(self.input)


def messages_of(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items, of an input or an output, as chat messages. Raises VLLMValidationError naming the item."""
    return [message for message, _ in _placed_messages(items)]


def _placed_messages(items: list[dict[str, Any]]) -> list[tuple[dict[str, Any], Place]]:
    """Chat messages, each with where it comes from."""
    messages: list[tuple[dict[str, Any], Place]] = []
    turn: dict[str, Any] | None = None
    for i, item in enumerate(items):
        where = f"input.{i}"
        kind = item.get("type", "message")
        role = item.get("role") if kind == "message" else None
        if kind in ("function_call", "reasoning") or role == "assistant":
            if turn is None or (role == "assistant" and turn["content"] is not None):
                turn = {"role": "assistant", "content": None}
                messages.append((turn, Place(where)))
            _say(turn, kind, item, where)
            continue
        turn = None
        if kind == "function_call_output":
            output = item.get("output")
            told = output if isinstance(output, str) else _text(output, f"{where}.output")
            result = {"role": "tool", "tool_call_id": _field(item, "call_id", where), "content": told}
            messages.append((result, Place(where)))
        elif kind == "message" and role in _ROLES:
            content = _content(item.get("content"), f"{where}.content")
            parts = tuple(f"{where}.content.{j}" for j in range(len(content))) if isinstance(content, list) else ()
            messages.append(({"role": role, "content": content}, Place(where, parts)))
        elif kind == "message":
            raise VLLMValidationError(
                f"a message needs one of the roles {', '.join(_ROLES)}", parameter=f"{where}.role"
            )
        else:
            raise VLLMValidationError(f"an item of type {str(kind)[:64]!r} is not supported", parameter=f"{where}.type")
    return messages


def _say(turn: dict[str, Any], kind: str, item: dict[str, Any], where: str) -> None:
    """Add an item to an assistant's turn."""
    if kind == "message":
        turn["content"] = _text(item.get("content"), f"{where}.content")
    elif kind == "reasoning":
        parts = item.get("content") or []
        if item.get("encrypted_content") and not parts:
            raise VLLMValidationError(
                "reasoning that another server has encrypted cannot be read here: leave it out, or give its content",
                parameter=f"{where}.encrypted_content",
            )
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise VLLMValidationError("content must be a list of parts with text", parameter=f"{where}.content")
        texts = [_field(part, "text", f"{where}.content.{j}") for j, part in enumerate(parts)]
        turn["reasoning"] = turn.get("reasoning", "") + "".join(texts)
    else:
        function = {"name": _field(item, "name", where), "arguments": _field(item, "arguments", where)}
        call = {"id": _field(item, "call_id", where), "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)


def _content(content: Any, where: str) -> Any:
    """Texts as one text; with images, as the parts of a chat message."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") == "input_image" for part in content
    ):
        return [_part(part, f"{where}.{i}") for i, part in enumerate(content)]
    return _text(content, where)


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, dict) and part.get("type") == "input_image":
        return {"type": "image_url", "image_url": {"url": _field(part, "image_url", where)}}
    return {"type": "text", "text": _text([part], where)}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise VLLMValidationError("content must be a text or a list of parts", parameter=where)
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in _TEXTS:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            what = f"a part of type {str(kind)[:64]!r} is not supported here"
            raise VLLMValidationError(what, parameter=f"{where}.{i}.type")
        texts.append(_field(part, "text", f"{where}.{i}"))
    return "\n".join(texts)


def _field(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise VLLMValidationError(f"{name} must be a text", parameter=f"{where}.{name}")
    return value


def _function(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:64]
        raise VLLMValidationError(f"a tool of type {kind!r} is not supported: use function", parameter=f"{where}.type")
    named = {name: tool.get(name) for name in ("description", "parameters", "strict")}
    return {"type": "function", "function": {"name": _field(tool, "name", where), **named}}


def _choice(choice: Any) -> Any:
    if choice is None or choice in ("none", "auto", "required"):
        return choice
    if not isinstance(choice, dict):
        raise _bad_choice()
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": _field(choice, "name", "tool_choice")}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [{"type": "function", "function": {"name": _field(tool, "name", "tool_choice.tools")}}
                 for tool in choice["tools"] if isinstance(tool, dict)]  # fmt: skip
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": tools}}
    raise _bad_choice()


def _bad_choice() -> VLLMValidationError:
    return VLLMValidationError(
        "tool_choice must be none, auto, required, a function or allowed_tools", parameter="tool_choice"
    )


class ResponseUsage(RequestBody):
    """Token counts of a response."""

    input_tokens: int = 0
    input_tokens_details: dict[str, int] = Field(default_factory=dict)
    output_tokens: int = 0
    output_tokens_details: dict[str, int] = Field(default_factory=dict)
    total_tokens: int = 0

    def plain(self) -> UsageInfo:
        """The same as in chats."""
        return UsageInfo(
            prompt_tokens=self.input_tokens, completion_tokens=self.output_tokens, total_tokens=self.total_tokens
        )


class ResponsesResponse(RequestBody):
    """A response; `status` is queued, in_progress, completed, incomplete, failed or cancelled."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: str
    background: bool = False
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any] | None = None
    model: str
    output: list[dict[str, Any]] = Field(default_factory=list)
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: dict[str, Any] | None = None
    service_tier: str | None = None
    store: bool = False
    temperature: float | None = None
    text: dict[str, Any] = Field(default_factory=lambda: {"format": {"type": "text"}})
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]] = Field(default_factory=list)
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
