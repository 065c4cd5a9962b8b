"""Bodies of Anthropic's Messages API: https://docs.anthropic.com/en/api/messages."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from hardpoint.env import envs
from hardpoint.errors import VLLMValidationError
from hardpoint.front_end.server.field_names import FieldNames, Place
from hardpoint.front_end.server.protocol.base import RequestBody, UsageInfo, random_id
from hardpoint.front_end.server.protocol.chat import MAX_MESSAGES, ChatCompletionRequest, check_tool_names
from hardpoint.front_end.server.refusals import COUNT_TOKENS, MESSAGES, FieldRules

# What a chat request calls it -> what we do; the more special ones first.
_NAMES = {
    "tools.*.function.parameters": "tools.*.input_schema",
    "tools.*.function": "tools.*",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
    "image_url": "image",
}
_BLOCKS_OF = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise VLLMValidationError("content must be a text or a list of blocks", parameter=where)
    for i, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise VLLMValidationError("a block must be an object with a type", parameter=f"{where}.{i}")
    return content


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise VLLMValidationError("messages must be a non-empty list", parameter="messages")
    if len(value) > MAX_MESSAGES:
        raise VLLMValidationError(
            f"messages takes at most {MAX_MESSAGES} entries, got {len(value)}", parameter="messages"
        )
    for i, message in enumerate(value):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in (*_BLOCKS_OF, "system"):
            raise VLLMValidationError("a message needs the role user or assistant", parameter=f"messages.{i}.role")
        for j, block in enumerate(_blocks(message.get("content"), f"messages.{i}.content")):
            if block["type"] not in _BLOCKS_OF.get(role, ("text",)):
                what = f"a block of type {block['type'][:64]!r} is not supported in a {role} message"
                raise VLLMValidationError(what, parameter=f"messages.{i}.content.{j}.type")
    return value


def _stop_sequences(value: Any) -> Any:
    if isinstance(value, list) and len(value) > envs.VLLM_MAX_STOP_STRINGS:
        what = f"stop_sequences takes at most {envs.VLLM_MAX_STOP_STRINGS} texts, got {len(value)}"
        raise VLLMValidationError(what, parameter="stop_sequences")
    if isinstance(value, list) and "" in value:
        raise VLLMValidationError("stop_sequences must not contain an empty text", parameter="stop_sequences")
    return value


class MessagesTool(RequestBody):
    """A tool the model may call."""

    rules: ClassVar[FieldRules] = MESSAGES.inside("tools.*")

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class MessagesToolChoice(RequestBody):
    """Whether a tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(RequestBody):
    """Whether the model thinks before it answers."""

    rules: ClassVar[FieldRules] = MESSAGES.inside("thinking")

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputFormat(RequestBody):
    """What the text of the answer is bound to."""

    type: Literal["json_schema"]
    # Named so because `schema` is taken on every model.
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestBody):
    """How the answer is made."""

    rules: ClassVar[FieldRules] = MESSAGES.inside("output_config")

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(RequestBody):
    """A conversation whose tokens are to be counted."""

    rules: ClassVar[FieldRules] = COUNT_TOKENS

    model: str | None = None
    messages: Annotated[list[dict[str, Any]], BeforeValidator(_messages)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _tool_names(self) -> CountTokensRequest:
        check_tool_names([tool.name for tool in self.tools or ()], "tools.{}.name")
        return self

    def to_chat(self) -> tuple[ChatCompletionRequest, FieldNames]:
        """The same as a chat request, and what its fields are called here.

        Raises VLLMValidationError for what it cannot say.
        """
        made = [*self._system(), *self._conversation()]
        names = FieldNames(_NAMES, [place for _, place in made])
        with names.told():
            return self._as_chat([message for message, _ in made]), names

    def _as_chat(self, messages: list[dict[str, Any]]) -> ChatCompletionRequest:
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "chat_template_kwargs": self._template_arguments(),
            "continue_final_message": self._ends_with_words() or None,
            **self._output(),
            **self._tools(),
            **self._more(),
        }
        return ChatCompletionRequest(**{name: value for name, value in fields.items() if value is not None})

    def _more(self) -> dict[str, Any]:
        """What else the chat request says."""
        return {}

    def _output(self) -> dict[str, Any]:
        config = self.output_config
        if config is None:
            return {}
        made: dict[str, Any] = {"reasoning_effort": config.effort}
        if config.format is not None:
            schema = {"name": "output", "schema": config.format.json_schema}
            made["response_format"] = {"type": "json_schema", "json_schema": schema}
        return made

    def _system(self) -> list[_Made]:
        text = _text_of(self.system, "system") if self.system is not None else ""
        return [({"role": "system", "content": text}, Place("system"))] if text else []

    def _conversation(self) -> list[_Made]:
        made: list[_Made] = []
        for i, message in enumerate(self.messages):
            where = f"messages.{i}.content"
            blocks = _blocks(message["content"], where)
            made += _assistant(blocks, where) if message["role"] == "assistant" else _told(message, blocks, where)
        return made

    def _ends_with_words(self) -> bool:
        """Whether the client has begun the answer, which then goes on from there."""
        last = self.messages[-1]
        blocks = _blocks(last["content"], "")
        return last["role"] == "assistant" and bool(blocks) and all(block["type"] == "text" for block in blocks)

    def _template_arguments(self) -> dict[str, Any] | None:
        given = dict(self.chat_template_kwargs or {})
        if self.thinking is not None:
            # The name under which templates of models that think know it.
            given.setdefault("enable_thinking", self.thinking.type != "disabled")
        return given or None

    def _tools(self) -> dict[str, Any]:
        if not self.tools:
            if self.tool_choice is not None and self.tool_choice.type in ("any", "tool"):
                raise VLLMValidationError("tool_choice needs tools", parameter="tool_choice")
            return {}
        functions = [
            {"type": "function", "function": _function(tool)} for tool in self.tools
        ]  # fmt: skip
        choice = self.tool_choice
        if choice is None:
            return {"tools": functions, "tool_choice": "auto"}
        words: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
        if choice.type == "tool":
            if not choice.name:
                raise VLLMValidationError("tool_choice of type tool needs a name", parameter="tool_choice.name")
            words["tool"] = {"type": "function", "function": {"name": choice.name}}
        return {
            "tools": functions,
            "tool_choice": words[choice.type],
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
        }


class MessagesRequest(CountTokensRequest):
    """A request for the next message of a conversation."""

    rules: ClassVar[FieldRules] = MESSAGES

    max_tokens: int = Field(ge=1)
    metadata: dict[str, Any] | None = None
    stop_sequences: Annotated[list[str] | None, BeforeValidator(_stop_sequences)] = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    request_id: str = Field(default_factory=random_id)

    def _more(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "request_id": self.request_id,
        }


# A chat message, and where it comes from.
_Made = tuple[dict[str, Any], Place]


def _function(tool: MessagesTool) -> dict[str, Any]:
    return {
        "name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict,
    }  # fmt: skip


def _told(message: dict[str, Any], blocks: list[dict[str, Any]], where: str) -> list[_Made]:
    """What a user message says, results of tools first, as the model's templates expect them after the calls."""
    results, parts, places = list[_Made](), [], list[str]()
    for j, block in enumerate(blocks):
        place = f"{where}.{j}"
        if block["type"] == "tool_result":
            results.append((_result(block, place), Place(place)))
            continue
        places.append(place)
        text = None if block["type"] == "image" else _field(block, "text", place)
        parts.append(_image(block, place) if text is None else {"type": "text", "text": text})
    texts = [part["text"] for part in parts if part["type"] == "text"]
    content: Any = "\n".join(texts) if len(texts) == len(parts) else parts
    if parts or not results:
        results.append(({"role": message["role"], "content": content}, Place(where, tuple(places))))
    return results


def _result(block: dict[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content")
    text = _text_of(content, f"{where}.content") if content is not None else ""
    if block.get("is_error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": _field(block, "tool_use_id", where), "content": text}


def _image(block: dict[str, Any], where: str) -> dict[str, Any]:
    source = block.get("source")
    if isinstance(source, dict) and source.get("type") == "base64":
        data, kind = _field(source, "data", f"{where}.source"), _field(source, "media_type", f"{where}.source")
        return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
    if isinstance(source, dict) and source.get("type") == "url":
        return {"type": "image_url", "image_url": {"url": _field(source, "url", f"{where}.source")}}
    raise VLLMValidationError("an image needs a source of type base64 or url", parameter=f"{where}.source")


def _assistant(blocks: list[dict[str, Any]], where: str) -> list[_Made]:
    texts, thoughts, calls = [], [], []
    for j, block in enumerate(blocks):
        place = f"{where}.{j}"
        if block["type"] == "text":
            texts.append(_field(block, "text", place))
        elif block["type"] == "thinking":
            thoughts.append(_field(block, "thinking", place))
        elif block["type"] == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise VLLMValidationError("input must be an object", parameter=f"{place}.input")
            function = {"name": _field(block, "name", place), "arguments": json.dumps(arguments)}
            calls.append({"id": _field(block, "id", place), "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or None}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [(message, Place(where))]


def _text_of(content: Any, where: str) -> str:
    texts = []
    for i, block in enumerate(_blocks(content, where)):
        if block["type"] != "text":
            what = f"a block of type {block['type'][:64]!r} is not supported here: use text"
            raise VLLMValidationError(what, parameter=f"{where}.{i}.type")
        texts.append(_field(block, "text", f"{where}.{i}"))
    return "\n".join(texts)


def _field(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise VLLMValidationError(f"{name} must be a text", parameter=f"{where}.{name}")
    return value


class MessagesUsage(RequestBody):
    """Token counts of one request."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0

    def plain(self) -> UsageInfo:
        """The same as OpenAI's."""
        total = self.input_tokens + self.output_tokens
        return UsageInfo(prompt_tokens=self.input_tokens, completion_tokens=self.output_tokens, total_tokens=total)


class MessagesResponse(RequestBody):
    """The assistant's message."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class CountTokensResponse(RequestBody):
    """How long a conversation is."""

    input_tokens: int
