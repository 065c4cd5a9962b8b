"""The fields completions and chat completions share, and how they become SamplingParams."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from hardpoint.env import envs
from hardpoint.errors import VLLMValidationError
from hardpoint.front_end.server.asgi import REQUEST_ID_MAX_CHARS, valid_request_id
from hardpoint.front_end.server.protocol.base import (
    INT64_MAX,
    INT64_MIN,
    RequestBody,
    StreamOptions,
    random_id,
)
from hardpoint.front_end.server.protocol.structured import structured_outputs_of, with_older_names
from hardpoint.types.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
)

_SALT_FORBIDDEN = set("@/\\\0")
# What OpenAI's API takes when neither the request nor the generation config says.
_FALLBACKS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def _stop_strings(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise VLLMValidationError("stop must be a text or a list of texts", parameter="stop")
    if any(not text for text in texts):
        raise VLLMValidationError("stop must not contain an empty string", parameter="stop")
    limit = envs.VLLM_MAX_STOP_STRINGS
    if len(texts) > limit:
        raise VLLMValidationError(f"stop takes at most {limit} strings, got {len(texts)}", parameter="stop")
    return texts


Int64 = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]
StopParam = Annotated[list[str], BeforeValidator(_stop_strings)]
ExtraArg = str | int | float | list[str | int | float]


class SharedRequest(RequestBody):
    """Fields of both generation routes; `max_tokens` and `logprobs` differ and are the subclass's."""

    # The name of the field that limits the output, for error messages.
    limit_field: ClassVar[str] = "max_tokens"

    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = 1
    presence_penalty: float | None = None
    seed: Int64 | None = None
    stop: StopParam = Field(default_factory=list)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    watermarking: bool | None = None
    length_penalty: float = 1.0
    stop_token_ids: list[int] | None = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT64_MAX)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    bad_words: list[str] = Field(default_factory=list)
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: Int64 = 0
    request_id: str = Field(default_factory=random_id)
    session_id: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    routed_experts_prompt_start: int = Field(default=0, ge=0)
    return_token_offsets: bool | None = False
    mm_payload: str = "tensors"
    return_mm_kwargs: bool | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, ExtraArg] | None = None
    repetition_detection: dict[str, int] | None = None
    thinking_token_budget: int | None = None
    stream_interval: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _older_names(cls, data: Any) -> Any:
        return with_older_names(data)

    @field_validator("logit_bias")
    @classmethod
    def _bias_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or {}:
            if not key.isdecimal():
                raise VLLMValidationError(
                    f"logit_bias keys must be token ids, got {key[:32]!r}", parameter="logit_bias"
                )
        return value

    @field_validator("request_id")
    @classmethod
    def _plain_id(cls, value: str) -> str:
        if not valid_request_id(value):
            raise VLLMValidationError(
                f"request_id must have 1 to {REQUEST_ID_MAX_CHARS} printable ASCII characters without spaces",
                parameter="request_id",
            )
        return value

    @field_validator("bad_words")
    @classmethod
    def _few_bad_words(cls, value: list[str]) -> list[str]:
        limit = envs.VLLM_MAX_NUM_BAD_WORDS
        if len(value) > limit:
            raise VLLMValidationError(f"bad_words takes at most {limit} words, got {len(value)}", parameter="bad_words")
        return value

    @field_validator("cache_salt")
    @classmethod
    def _plain_salt(cls, value: str | None) -> str | None:
        if value is not None and (not 1 <= len(value) <= 128 or _SALT_FORBIDDEN & set(value)):
            raise VLLMValidationError(
                "cache_salt must have 1 to 128 characters, none of @ / \\ NUL", parameter="cache_salt"
            )
        return value

    @model_validator(mode="after")
    def _stream_rules(self) -> SharedRequest:
        if self.stream_options is not None and not self.stream:
            raise VLLMValidationError("stream_options is only allowed with stream=true", parameter="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise VLLMValidationError("prompt_logprobs is not available with stream=true", parameter="prompt_logprobs")
        if self.prompt_logprobs is not None and self.prompt_logprobs < -1:
            raise VLLMValidationError(
                "prompt_logprobs must be -1 (whole vocabulary) or at least 0", parameter="prompt_logprobs"
            )
        return self

    def sampling_fields(self, defaults: dict[str, Any]) -> dict[str, Any]:
        """The shared part of SamplingParams' arguments.

        defaults  the model's generation config, used where the request says nothing
        """
        fields: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                "n", "frequency_penalty", "presence_penalty", "seed", "stop", "stop_token_ids", "ignore_eos",
                "min_tokens", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
                "allowed_token_ids", "bad_words", "logprob_token_ids", "thinking_token_budget", "stream_interval",
                "watermarking", "routed_experts_prompt_start",
            )
        }  # fmt: skip
        for name, fallback in _FALLBACKS.items():
            value = getattr(self, name)
            fields[name] = defaults.get(name, fallback) if value is None else value
        fields["logit_bias"] = {int(key): value for key, value in (self.logit_bias or {}).items()} or None
        fields["output_kind"] = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        fields["extra_args"] = self._extra_args()
        if self.repetition_detection is not None:
            fields["repetition_detection"] = RepetitionDetectionParams(**self.repetition_detection)
        fields["structured_outputs"] = structured_outputs_of(self.structured_outputs, self.response_format)
        return fields

    def _extra_args(self) -> dict[str, Any] | None:
        extra: dict[str, Any] = dict(self.vllm_xargs or {})
        if self.kv_transfer_params:
            extra["kv_transfer_params"] = self.kv_transfer_params
        if self.ec_transfer_params:
            extra["ec_transfer_params"] = self.ec_transfer_params
        return extra or None

    def wanted_logprobs(self) -> tuple[int | None, int | None]:
        """How many log-probabilities per output token and per prompt token."""
        raise NotImplementedError

    def to_sampling_params(self, max_tokens: int | None, default_sampling_params: dict[str, Any]) -> SamplingParams:
        """Build the engine's parameters; `max_tokens` is already resolved (None = up to the context).

        Raises VLLMValidationError naming the field that is out of range.
        """
        logprobs, prompt_logprobs = self.wanted_logprobs()
        return SamplingParams.from_optional(
            **self.sampling_fields(default_sampling_params),
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            skip_clone=True,
        )
