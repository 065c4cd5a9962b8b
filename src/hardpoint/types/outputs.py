"""What a caller gets back: vLLM's request and completion outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from hardpoint.extensions.refs import load_ref
from hardpoint.log import init_logger
from hardpoint.types.logprobs import FlatLogprobs, PromptLogprobs, SampleLogprobs
from hardpoint.types.lora_request import LoRARequest
from hardpoint.types.stats import RequestStateStats

logger = init_logger(__name__)
T = TypeVar("T")


@dataclass
class CompletionOutput:
    """One of a request's `n` outputs; `text` and `token_ids` are a delta or cumulative."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: SampleLogprobs | FlatLogprobs | None
    routed_experts: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None
    sampling_mask: Any = None
    spec_decode_metrics: Any = None
    weight_versions: list[Any] | None = None

    def finished(self) -> bool:
        """Whether this output has ended."""
        return self.finish_reason is not None


class RequestOutput:
    """All outputs of one generation request so far."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int] | None,
        prompt_logprobs: PromptLogprobs | FlatLogprobs | None,
        outputs: list[CompletionOutput],
        finished: bool,
        metrics: RequestStateStats | None = None,
        lora_request: LoRARequest | None = None,
        encoder_prompt: str | None = None,
        encoder_prompt_token_ids: list[int] | None = None,
        num_cached_tokens: int | None = None,
        num_cache_creation_tokens: int | None = None,
        *,
        prompt_token_id_logprobs: Any = None,
        kv_transfer_params: dict[str, Any] | None = None,
        ec_transfer_params: dict[str, Any] | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            logger.warning_once("RequestOutput: unknown arguments %s are ignored", sorted(unknown))
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.prompt_logprobs = prompt_logprobs
        self.outputs = outputs
        self.finished = finished
        self.metrics = metrics
        self.lora_request = lora_request
        self.encoder_prompt = encoder_prompt
        self.encoder_prompt_token_ids = encoder_prompt_token_ids
        self.num_cached_tokens = num_cached_tokens
        self.num_cache_creation_tokens = num_cache_creation_tokens
        self.prompt_token_id_logprobs = prompt_token_id_logprobs
        self.kv_transfer_params = kv_transfer_params
        self.ec_transfer_params = ec_transfer_params

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        """Merge a later output: append deltas when `aggregate`, else replace by index."""
        self.finished |= next_output.finished
        self.metrics = next_output.metrics or self.metrics
        self.kv_transfer_params = next_output.kv_transfer_params or self.kv_transfer_params
        self.ec_transfer_params = next_output.ec_transfer_params or self.ec_transfer_params
        if next_output.prompt_logprobs is not None:
            self.prompt_logprobs = next_output.prompt_logprobs
        if next_output.num_cached_tokens is not None:
            self.num_cached_tokens = next_output.num_cached_tokens
        if next_output.num_cache_creation_tokens is not None:
            self.num_cache_creation_tokens = next_output.num_cache_creation_tokens
        at = {output.index: i for i, output in enumerate(self.outputs)}
        for new in next_output.outputs:
            if new.index not in at:
                self.outputs.append(new)
            elif aggregate:
                _append(self.outputs[at[new.index]], new)
            else:
                self.outputs[at[new.index]] = new

    def __repr__(self) -> str:
        return (
            f"RequestOutput(request_id={self.request_id!r}, prompt={self.prompt!r}, "
            f"prompt_token_ids={self.prompt_token_ids}, outputs={self.outputs}, finished={self.finished}, "
            f"num_cached_tokens={self.num_cached_tokens})"
        )


def _append(old: CompletionOutput, new: CompletionOutput) -> None:
    old.text += new.text
    old.token_ids = [*old.token_ids, *new.token_ids]
    if new.logprobs is not None:
        if old.logprobs is None:
            old.logprobs = new.logprobs
        else:
            old.logprobs.extend(new.logprobs)  # type: ignore[arg-type]
    old.cumulative_logprob = new.cumulative_logprob
    old.finish_reason = new.finish_reason
    old.stop_reason = new.stop_reason


@dataclass
class RequestError:
    """Why one request failed."""

    code: str
    message: str
    retryable: bool = False


class PoolingOutput:
    """What a pooler made of one prompt.

    array  the numbers on the host, as they came from the engine
    """

    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def data(self) -> Any:
        """The same as a torch.Tensor; imports torch where nobody has yet."""
        return load_ref("torch:from_numpy")(self.array) if isinstance(self.array, np.ndarray) else self.array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolingOutput) and bool(np.array_equal(self.array, other.array))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"PoolingOutput(data={self.array!r})"


@dataclass
class PoolingRequestOutput(Generic[T]):
    """The answer to one pooling request; `error` says why there is none."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool
    error: RequestError | None = field(default=None, kw_only=True)


@dataclass
class EmbeddingOutput:
    """An embedding."""

    embedding: list[float]

    @classmethod
    def from_base(cls, output: PoolingOutput) -> EmbeddingOutput:
        """Raises ValueError for what is not one vector."""
        if output.array.ndim != 1:
            raise ValueError(f"an embedding is one vector, got an array of shape {output.array.shape}")
        return cls(output.array.tolist())

    @property
    def hidden_size(self) -> int:
        """Its dimensions."""
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """The probability of each class."""

    probs: list[float]

    @classmethod
    def from_base(cls, output: PoolingOutput) -> ClassificationOutput:
        """Raises ValueError for what is not one vector."""
        if output.array.ndim != 1:
            raise ValueError(f"probabilities are one vector, got an array of shape {output.array.shape}")
        return cls(output.array.tolist())

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.probs)


@dataclass
class ScoringOutput:
    """How well two texts fit together."""

    score: float

    @classmethod
    def from_base(cls, output: PoolingOutput) -> ScoringOutput:
        """Raises ValueError for what is not one number."""
        if output.array.size != 1:
            raise ValueError(f"a score is one number, got an array of shape {output.array.shape}")
        return cls(float(output.array.reshape(())))


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The answer to a request for an embedding."""

    @classmethod
    def from_base(cls, request_output: PoolingRequestOutput[PoolingOutput]) -> EmbeddingRequestOutput:
        """Read the raw answer."""
        return _as(cls, request_output, EmbeddingOutput.from_base(request_output.outputs))


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The answer to a request for classes."""

    @classmethod
    def from_base(cls, request_output: PoolingRequestOutput[PoolingOutput]) -> ClassificationRequestOutput:
        """Read the raw answer."""
        return _as(cls, request_output, ClassificationOutput.from_base(request_output.outputs))


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The answer to a request for a score."""

    @classmethod
    def from_base(cls, request_output: PoolingRequestOutput[PoolingOutput]) -> ScoringRequestOutput:
        """Read the raw answer."""
        return _as(cls, request_output, ScoringOutput.from_base(request_output.outputs))


def _as(cls: Any, base: PoolingRequestOutput[PoolingOutput], outputs: Any) -> Any:
    return cls(
        request_id=base.request_id,
        outputs=outputs,
        prompt_token_ids=base.prompt_token_ids,
        num_cached_tokens=base.num_cached_tokens,
        finished=base.finished,
        error=base.error,
    )
