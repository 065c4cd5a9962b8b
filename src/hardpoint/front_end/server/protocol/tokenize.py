"""Bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from hardpoint.errors import VLLMValidationError
from hardpoint.front_end.server.protocol.base import OpenAIBaseModel, RequestBody
from hardpoint.front_end.server.protocol.chat import ChatCompletionToolsParam, check_messages


class TokenizeCompletionRequest(RequestBody):
    """Turn a text into ids."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(RequestBody):
    """Turn a conversation into ids, through the chat template."""

    model: str | None = None
    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    return_token_strs: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    tools: list[ChatCompletionToolsParam] | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _messages(cls, value: Any) -> list[dict[str, Any]]:
        return check_messages(value)

    @model_validator(mode="after")
    def _one_ending(self) -> TokenizeChatRequest:
        if self.continue_final_message and self.add_generation_prompt:
            if "add_generation_prompt" in self.model_fields_set:
                raise VLLMValidationError(
                    "continue_final_message and add_generation_prompt exclude each other",
                    parameter="continue_final_message",
                )
            self.add_generation_prompt = False
        return self


class TokenizeResponse(OpenAIBaseModel):
    """Ids, and their texts when asked."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody):
    """Turn ids into a text."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


class DetokenizeResponse(OpenAIBaseModel):
    """The text."""

    prompt: str


class TokenizerInfoResponse(OpenAIBaseModel):
    """The tokenizer's class and whatever its configuration says."""

    tokenizer_class: str
