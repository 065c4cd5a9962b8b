"""Bodies of /v1/chat/completions."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from hardpoint.errors import VLLMValidationError
from hardpoint.front_end.server.protocol.base import (
    FunctionDefinition,
    LogprobBody,
    PerRequestMetrics,
    UsageInfo,
    now,
    random_id,
)
from hardpoint.front_end.server.protocol.sampling import SharedRequest
from hardpoint.front_end.server.refusals import CHAT, FieldRules
from hardpoint.types.answers import DeltaMessage, FunctionCall, OpenAIBaseModel, ToolCall

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_MESSAGES = 16384


class ChatCompletionToolsParam(OpenAIBaseModel):
    """A tool the model may call."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class ChatCompletionNamedFunction(OpenAIBaseModel):
    """The name of a function."""

    name: str


class ChatCompletionNamedToolChoiceParam(OpenAIBaseModel):
    """ "Call this one"."""

    function: ChatCompletionNamedFunction
    type: Literal["function"] = "function"


class AllowedTools(OpenAIBaseModel):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: list[ChatCompletionNamedToolChoiceParam] = Field(min_length=1)


class ChatCompletionAllowedToolsChoiceParam(OpenAIBaseModel):
    """ "Only these"."""

    allowed_tools: AllowedTools
    type: Literal["allowed_tools"]


ToolChoice = (
    Literal["none", "auto", "required"] | ChatCompletionAllowedToolsChoiceParam | ChatCompletionNamedToolChoiceParam
)


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Check roles and content shapes; the parts' meaning is the renderer's.

    Raises VLLMValidationError naming the message.
    """
    if not isinstance(messages, list) or not messages:
        raise VLLMValidationError("messages must be a non-empty list", parameter="messages")
    if len(messages) > MAX_MESSAGES:
        raise VLLMValidationError(
            f"messages takes at most {MAX_MESSAGES} entries, got {len(messages)}", parameter="messages"
        )
    for i, message in enumerate(messages):
        where = f"messages.{i}"
        if not isinstance(message, dict):
            raise VLLMValidationError("a message must be an object with role and content", parameter=where)
        if message.get("role") not in ROLES:
            role = str(message.get("role"))[:64]
            raise VLLMValidationError(f"unknown role {role!r}; known: {', '.join(ROLES)}", parameter=f"{where}.role")
        content = message.get("content")
        if content is None and message["role"] != "assistant" and message["role"] != "function":
            raise VLLMValidationError(f"a {message['role']} message needs content", parameter=f"{where}.content")
        if content is not None and not isinstance(content, str | list):
            raise VLLMValidationError("content must be a text or a list of parts", parameter=f"{where}.content")
        _check_calls(message.get("tool_calls"), f"{where}.tool_calls")
    return messages


def _check_calls(calls: Any, where: str) -> None:
    if calls is not None and not isinstance(calls, list):
        raise VLLMValidationError("tool_calls must be a list", parameter=where)
    for i, call in enumerate(calls or ()):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise VLLMValidationError("a tool call needs a function with a name", parameter=f"{where}.{i}")


def check_tool_names(names: list[Any], place: str) -> None:
    """Refuse a name that two tools have: nobody could say which is called.

    place  of the name of the tool `{}`
    """
    for index, name in enumerate(names):
        if name == "":
            raise VLLMValidationError("a tool needs a name", parameter=place.format(index))
        if name in names[:index]:
            raise VLLMValidationError(f"two tools have the name {str(name)[:64]!r}", parameter=place.format(index))


class ChatCompletionRequest(SharedRequest):
    """A request for the next message of a conversation."""

    rules: ClassVar[FieldRules] = CHAT
    limit_field: ClassVar[str] = "max_completion_tokens"

    messages: list[dict[str, Any]]
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: list[ChatCompletionToolsParam] | None = None
    tool_choice: ToolChoice | None = "none"
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool = True
    parallel_tool_calls: bool | None = True
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[dict[str, str]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    return_prompt_text: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _tools_mean_auto(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("tools") and data.get("tool_choice") is None:
            data = {**data, "tool_choice": "auto"}
        return data

    @field_validator("messages", mode="before")
    @classmethod
    def _messages(cls, value: Any) -> list[dict[str, Any]]:
        return check_messages(value)

    @model_validator(mode="after")
    def _chat_rules(self) -> ChatCompletionRequest:
        if self.top_logprobs:
            if not self.logprobs:
                raise VLLMValidationError("top_logprobs needs logprobs=true", parameter="top_logprobs")
            if self.top_logprobs < -1:
                raise VLLMValidationError(
                    "top_logprobs must be -1 (whole vocabulary) or at least 0", parameter="top_logprobs"
                )
        if self.logprob_token_ids and not self.logprobs:
            raise VLLMValidationError("logprob_token_ids needs logprobs=true", parameter="logprob_token_ids")
        if self.continue_final_message and self.add_generation_prompt:
            # The default of add_generation_prompt is true: only an explicit pair is a contradiction.
            if "add_generation_prompt" in self.model_fields_set:
                raise VLLMValidationError(
                    "continue_final_message and add_generation_prompt exclude each other",
                    parameter="continue_final_message",
                )
            self.add_generation_prompt = False
        limit = self.output_limit
        if limit is not None and limit < 1:
            name = self.limit_field if self.max_completion_tokens is not None else "max_tokens"
            raise VLLMValidationError(f"{name} must be at least 1, got {limit}", parameter=name)
        if self.tool_choice not in (None, "none") and not self.tools:
            raise VLLMValidationError("tool_choice needs tools", parameter="tool_choice")
        check_tool_names([tool.function.name for tool in self.tools or ()], "tools.{}.function.name")
        return self

    @property
    def output_limit(self) -> int | None:
        """max_completion_tokens, else its older name; None = up to the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def wanted_logprobs(self) -> tuple[int | None, int | None]:
        """`logprobs` switches them on, `top_logprobs` is their number."""
        return ((self.top_logprobs or 0) if self.logprobs else None), self.prompt_logprobs


class ChatCompletionLogProb(OpenAIBaseModel):
    """One candidate token; `bytes` are its UTF-8 bytes."""

    token: str
    logprob: float = -9999.0
    bytes: list[int] | None = None


class ChatCompletionLogProbsContent(ChatCompletionLogProb):
    """One output token with its best alternatives."""

    top_logprobs: list[ChatCompletionLogProb] = Field(default_factory=list)


class ChatCompletionLogProbs(OpenAIBaseModel):
    """One entry per output token."""

    content: list[ChatCompletionLogProbsContent] | None = None


class ChatMessage(OpenAIBaseModel):
    """The assistant's message."""

    role: str
    content: str | None = None
    refusal: str | None = None
    annotations: Any = None
    audio: Any = None
    function_call: FunctionCall | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list)
    reasoning: str | None = None


class ChatCompletionResponseChoice(OpenAIBaseModel):
    """One of the n answers."""

    index: int
    message: ChatMessage
    logprobs: ChatCompletionLogProbs | None = None
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: str | None = None


class ChatCompletionResponse(OpenAIBaseModel):
    """The whole answer."""

    id: str = Field(default_factory=lambda: f"chatcmpl-{random_id()}")
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(default_factory=now)
    model: str
    choices: list[ChatCompletionResponseChoice]
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    system_fingerprint: str | None = None
    usage: UsageInfo
    prompt_logprobs: list[dict[int, LogprobBody] | None] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    metrics: PerRequestMetrics | None = None


class ChatCompletionResponseStreamChoice(OpenAIBaseModel):
    """What a chunk adds to one answer."""

    index: int
    delta: DeltaMessage
    logprobs: ChatCompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionStreamResponse(OpenAIBaseModel):
    """One event of a stream."""

    id: str = Field(default_factory=lambda: f"chatcmpl-{random_id()}")
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int = Field(default_factory=now)
    model: str
    choices: list[ChatCompletionResponseStreamChoice]
    usage: UsageInfo | None = None
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    metrics: PerRequestMetrics | None = None
