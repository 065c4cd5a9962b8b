"""An assistant's answer and its fragments in OpenAI's shape: what parsers make and the HTTP server sends."""

from __future__ import annotations

import uuid
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class OpenAIBaseModel(BaseModel):
    """A body that accepts unknown fields, as OpenAI's API does."""

    model_config = ConfigDict(extra="allow")


def new_call_id() -> str:
    """A fresh id of a tool call."""
    return f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"


class FunctionCall(OpenAIBaseModel):
    """A call a model made; `arguments` is JSON text."""

    name: str
    arguments: str
    id: str | None = Field(default=None, exclude=True)


class ToolCall(OpenAIBaseModel):
    """One tool call of a message."""

    id: str = Field(default_factory=new_call_id)
    type: str = "function"
    function: FunctionCall


class DeltaFunctionCall(BaseModel):
    """A fragment of a function call."""

    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(OpenAIBaseModel):
    """A fragment of a tool call; `id`, `type` and the name come with the first only."""

    id: str | None = None
    type: str | None = None
    index: int
    function: DeltaFunctionCall | None = None


class ExtractedToolCallInformation(BaseModel):
    """What a tool parser found in a whole text."""

    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None = None


class DeltaMessage(OpenAIBaseModel):
    """A fragment of an assistant message."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[DeltaToolCall] = Field(default_factory=list)

    @property
    def thought(self) -> str | None:
        """The reasoning, also where a parser of an older release calls it `reasoning_content`."""
        extra: Any = (self.__pydantic_extra__ or {}).get("reasoning_content")
        return self.reasoning or extra
