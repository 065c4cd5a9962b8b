"""The scheduler section."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from hardpoint.config.sections.base import NonNegative, Positive, Section, derived
from hardpoint.errors import ConfigError
from hardpoint.extensions.refs import resolve_obj_by_qualname

RunnerType = Literal["generate", "pooling", "draft"]
SchedulerPolicy = Literal["fcfs", "priority"]

DEFAULT_SCHEDULER = "hardpoint.engine_core.scheduler.default.Scheduler"
ASYNC_SCHEDULER = "hardpoint.engine_core.scheduler.async_scheduler.AsyncScheduler"


@dataclass
class SchedulerConfig(Section):
    """How requests share the steps of the engine. `max_model_len` and `is_encoder_decoder` only check the rest."""

    DEFAULT_MAX_NUM_BATCHED_TOKENS: ClassVar[int] = 2048
    DEFAULT_MAX_NUM_BATCHED_TOKENS_FOR_BATCHED_DP: ClassVar[int] = 256
    DEFAULT_MAX_NUM_SEQS: ClassVar[int] = 128

    max_model_len: InitVar[int]
    is_encoder_decoder: InitVar[bool]
    runner_type: RunnerType = "generate"
    max_num_batched_tokens: Positive = DEFAULT_MAX_NUM_BATCHED_TOKENS
    max_num_scheduled_tokens: Positive | None = None
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = DEFAULT_MAX_NUM_SEQS
    max_num_active_seqs: Positive | None = None
    long_prefill_token_threshold: NonNegative = 0
    long_prefill_token_threshold_adaptive: bool = False
    max_num_queued_reqs: NonNegative | None = None
    max_num_queued_tokens: NonNegative | None = None
    enable_chunked_prefill: bool = True
    is_multimodal_model: bool = False
    policy: SchedulerPolicy = "fcfs"
    disable_chunked_mm_input: bool = False
    scheduler_cls: Any = None
    disable_hybrid_kv_cache_manager: bool | None = None
    scheduler_reserve_full_isl: bool = True
    watermark: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    prefill_schedule_interval: Positive = 1
    async_scheduling: bool | None = None
    stream_interval: Positive = 1
    # Ours: seconds a request may take over HTTP, waiting included; None = no limit.
    request_timeout: Annotated[float, msgspec.Meta(gt=0)] | None = None

    max_num_encoder_input_tokens: int = derived(0)
    encoder_cache_size: int = derived(0)

    def __post_init__(self, max_model_len: int, is_encoder_decoder: bool) -> None:
        super().__post_init__()
        self.max_num_encoder_input_tokens = self.max_num_batched_tokens
        self.encoder_cache_size = self.max_num_batched_tokens
        if is_encoder_decoder:
            self.enable_chunked_prefill = False
        self.verify_max_model_len(max_model_len)

    def verify_max_model_len(self, max_model_len: int) -> None:
        """Hold the token budget against the context length; raises `ConfigError`."""
        budget = self.max_num_batched_tokens
        if budget < max_model_len and not self.enable_chunked_prefill:
            raise ConfigError(
                f"scheduler_config.max_num_batched_tokens is {budget}: without chunked prefill a step must hold "
                f"the longest prompt, {max_model_len} tokens",
                code="config-value",
                fix="raise --max-num-batched-tokens, lower --max-model-len or drop --no-enable-chunked-prefill",
            )
        if budget < self.max_num_seqs:
            raise ConfigError(
                f"scheduler_config.max_num_batched_tokens is {budget}: it must be at least max_num_seqs, "
                f"{self.max_num_seqs}, so that every running request gets a token per step",
                code="config-value",
                fix="raise --max-num-batched-tokens or lower --max-num-seqs",
            )

        if self.max_num_scheduled_tokens is not None and self.max_num_scheduled_tokens > budget:
            raise ConfigError(
                f"scheduler_config.max_num_scheduled_tokens is {self.max_num_scheduled_tokens}: it is a part of "
                f"max_num_batched_tokens, {budget}",
                code="config-value",
                fix="lower --max-num-scheduled-tokens or raise --max-num-batched-tokens",
            )

    @classmethod
    def default_factory(cls, **values: Any) -> SchedulerConfig:
        """Return a section for tests and tools: 8192 tokens of context unless given."""
        values.setdefault("max_model_len", 8192)
        values.setdefault("is_encoder_decoder", False)
        return cls(**values)

    def get_scheduler_cls(self) -> type[Any]:
        """Return the scheduler class; imports the one that is named, with the errors of that."""
        chosen = self.scheduler_cls or (ASYNC_SCHEDULER if self.async_scheduling else DEFAULT_SCHEDULER)
        return chosen if isinstance(chosen, type) else resolve_obj_by_qualname(chosen)
