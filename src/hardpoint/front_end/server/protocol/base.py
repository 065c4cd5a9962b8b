"""What all bodies share: unknown fields are kept and logged; usage, errors, per-request metrics."""

from __future__ import annotations

import time
import uuid
from typing import Any, ClassVar

from pydantic import BaseModel, model_validator

from hardpoint.errors import VLLMValidationError
from hardpoint.front_end.server.refusals import CHAT, FieldRules
from hardpoint.log import init_logger
from hardpoint.types.answers import OpenAIBaseModel

logger = init_logger(__name__)

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

# Pairs, characters of a key, characters of a value.
METADATA_LIMITS = (16, 64, 512)
_MAX_REMEMBERED_NAMES = 256
_unknown_seen: set[str] = set()


def random_id() -> str:
    """32 hexadecimal digits."""
    return uuid.uuid4().hex


def now() -> int:
    """Unix time in whole seconds."""
    return int(time.time())


class RequestBody(OpenAIBaseModel):
    """What a client sends; unknown fields are ignored, and the log says so.

    rules  what becomes of fields that have no effect
    """

    rules: ClassVar[FieldRules] = FieldRules()

    @model_validator(mode="wrap")
    @classmethod
    def _note_unknown(cls, data: Any, handler: Any) -> Any:
        result = handler(data)
        extra = getattr(result, "__pydantic_extra__", None) or {}
        unknown = [name for name in extra if name not in cls.rules.known]
        if unknown:
            _log_unknown(cls.__name__, unknown)
        return result


def _log_unknown(kind: str, unknown: list[str]) -> None:
    """Warn about each new name once; past a bound (names come from clients) only at DEBUG."""
    names = [name[:64] for name in unknown]
    new = [name for name in names if name not in _unknown_seen]
    if new and len(_unknown_seen) + len(new) <= _MAX_REMEMBERED_NAMES:
        _unknown_seen.update(new)
        logger.warning("%s: unknown fields are ignored: %s", kind, ", ".join(sorted(new)))
    else:
        logger.debug("%s: unknown fields are ignored: %s", kind, ", ".join(sorted(names)[:20]))


def check_metadata(value: Any) -> None:
    """Hold a client's own labels against OpenAI's limits; raises VLLMValidationError."""
    if value is None:
        return
    pairs, key_chars, value_chars = METADATA_LIMITS
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        raise VLLMValidationError("metadata must be an object whose values are texts", parameter="metadata")
    if len(value) > pairs:
        raise VLLMValidationError(f"metadata takes at most {pairs} pairs, got {len(value)}", parameter="metadata")
    if any(len(key) > key_chars or len(one) > value_chars for key, one in value.items()):
        raise VLLMValidationError(
            f"metadata takes keys of at most {key_chars} characters and values of at most {value_chars}",
            parameter="metadata",
        )


class ErrorInfo(OpenAIBaseModel):
    """The inside of an error body."""

    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(OpenAIBaseModel):
    """An error body."""

    error: ErrorInfo


class PromptTokenUsageInfo(OpenAIBaseModel):
    """Where prompt tokens came from."""

    cached_tokens: int | None = None
    created_cache_tokens: int | None = None
    multimodal_tokens: dict[str, int] | None = None


class CompletionTokenUsageInfo(OpenAIBaseModel):
    """What kinds of tokens were generated."""

    reasoning_tokens: int = 0


class UsageInfo(OpenAIBaseModel):
    """Token counts of one request."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptTokenUsageInfo | None = None
    completion_tokens_details: CompletionTokenUsageInfo | None = None

    def plain(self) -> UsageInfo:
        """The same; other APIs' counts turn into this."""
        return self


class RequestResponseMetadata(BaseModel):
    """What middleware and plugins can read of an answered request from `request.state`."""

    request_id: str
    final_usage_info: UsageInfo | None = None


class PerRequestMetrics(OpenAIBaseModel):
    """Timing of one request (`--enable-per-request-metrics`)."""

    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None
    queue_time_ms: float | None = None
    mean_itl_ms: float | None = None
    tokens_per_second: float | None = None
    speculative_decoding: dict[str, Any] | None = None


class StreamOptions(RequestBody):
    """What a stream carries besides text."""

    rules: ClassVar[FieldRules] = CHAT.inside("stream_options")

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class LogprobBody(BaseModel):
    """One token's log-probability, as in `types.logprobs.Logprob`."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class FunctionDefinition(OpenAIBaseModel):
    """A function a model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
