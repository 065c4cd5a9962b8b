"""Bodies of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from hardpoint.env import envs
from hardpoint.errors import VLLMValidationError
from hardpoint.front_end.server.protocol.base import (
    LogprobBody,
    OpenAIBaseModel,
    PerRequestMetrics,
    UsageInfo,
    now,
    random_id,
)
from hardpoint.front_end.server.protocol.sampling import SharedRequest
from hardpoint.front_end.server.refusals import COMPLETIONS, FieldRules

# OpenAI's value when a request gives none, or null.
DEFAULT_MAX_TOKENS = 16


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _check_prompt(value: Any) -> Any:
    if value is None or isinstance(value, str) or (value and _is_ids(value)):
        return value
    if not isinstance(value, list) or not value:
        raise VLLMValidationError(
            "prompt must be a text, a list of texts, token ids, or a list of token id lists", parameter="prompt"
        )
    if not (all(isinstance(item, str) for item in value) or all(_is_ids(item) and item for item in value)):
        raise VLLMValidationError(
            "prompt lists must hold only texts or only non-empty token id lists", parameter="prompt"
        )
    limit = envs.VLLM_MAX_COMPLETION_PROMPTS
    if len(value) > limit:
        raise VLLMValidationError(f"prompt takes at most {limit} prompts, got {len(value)}", parameter="prompt")
    return value


Prompt = Annotated[
    list[int] | list[list[int]] | str | list[str] | None,
    Field(union_mode="left_to_right"),
    BeforeValidator(_check_prompt),
]


class CompletionRequest(SharedRequest):
    """A request to continue one or several prompts."""

    rules: ClassVar[FieldRules] = COMPLETIONS

    prompt: Prompt = None
    echo: bool | None = False
    logprobs: int | None = None
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    suffix: str | None = None
    prompt_embeds: Any = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _completion_rules(self) -> CompletionRequest:
        if self.prompt is None and self.prompt_embeds is None:
            raise VLLMValidationError("prompt is required", parameter="prompt")
        if self.logprobs is not None and self.logprobs < -1:
            raise VLLMValidationError("logprobs must be -1 (whole vocabulary) or at least 0", parameter="logprobs")
        if self.logprob_token_ids and self.logprobs is None:
            raise VLLMValidationError("logprob_token_ids needs logprobs", parameter="logprob_token_ids")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise VLLMValidationError(f"max_tokens must be at least 0, got {self.max_tokens}", parameter="max_tokens")
        if self.max_tokens == 0 and not self.echo:
            raise VLLMValidationError(
                "max_tokens=0 asks for nothing unless echo=true returns the prompt", parameter="max_tokens"
            )
        return self

    @property
    def prompt_only(self) -> bool:
        """Whether only the prompt is wanted back (max_tokens=0 with echo)."""
        return self.max_tokens == 0

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        assert self.prompt is not None
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]

    def wanted_logprobs(self) -> tuple[int | None, int | None]:
        """`echo` makes the prompt's log-probabilities part of `logprobs`."""
        prompt = self.prompt_logprobs
        if prompt is None and self.echo:
            prompt = self.logprobs
        return self.logprobs, prompt


class CompletionLogProbs(OpenAIBaseModel):
    """Parallel lists, one entry per token; `text[text_offset[i]:]` starts with `tokens[i]`."""

    text_offset: list[int] = Field(default_factory=list)
    token_logprobs: list[float | None] = Field(default_factory=list)
    tokens: list[str] = Field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = Field(default_factory=list)


class CompletionResponseChoice(OpenAIBaseModel):
    """One completion; index = prompt index x n + i."""

    index: int
    text: str
    logprobs: CompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, LogprobBody] | None] | None = None
    prompt_token_ids: list[int] | None = None
    routed_experts: str | None = None


class CompletionResponse(OpenAIBaseModel):
    """The whole answer."""

    id: str = Field(default_factory=lambda: f"cmpl-{random_id()}")
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(default_factory=now)
    model: str
    choices: list[CompletionResponseChoice]
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    system_fingerprint: str | None = None
    usage: UsageInfo
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    metrics: PerRequestMetrics | None = None


class CompletionResponseStreamChoice(OpenAIBaseModel):
    """What a chunk adds to one completion."""

    index: int
    text: str
    logprobs: CompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionStreamResponse(OpenAIBaseModel):
    """One event of a stream."""

    id: str = Field(default_factory=lambda: f"cmpl-{random_id()}")
    object: str = "text_completion"
    created: int = Field(default_factory=now)
    model: str
    choices: list[CompletionResponseStreamChoice]
    usage: UsageInfo | None = None
    system_fingerprint: str | None = None
    metrics: PerRequestMetrics | None = None
