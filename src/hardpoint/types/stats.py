"""Statistics: what the engine core counts per step and what the front end derives from it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from hardpoint.types.finish import FinishReason


@dataclass
class BaseCacheStats:
    """Counts since the last report; `queries` and `hits` are tokens."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0


@dataclass
class PrefixCacheStats(BaseCacheStats):
    """Prefix-cache lookups; those of preempted requests are kept apart."""

    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    hits_by_source: dict[str, int] = field(default_factory=dict)

    def record(
        self,
        num_tokens: int,
        num_hits: int,
        preempted: bool,
        hits_by_source: dict[str, int] | None = None,
    ) -> None:
        """Add one lookup of `num_tokens` tokens, `num_hits` of which were found."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
            return
        self.requests += 1
        self.queries += num_tokens
        self.hits += num_hits
        for source, tokens in (hits_by_source or {}).items():
            self.hits_by_source[source] = self.hits_by_source.get(source, 0) + tokens


@dataclass
class MultiModalCacheStats(BaseCacheStats):
    """Media-cache lookups; `queries` and `hits` are items."""


@dataclass
class PrefillStats:
    """Where one request's prompt tokens came from."""

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0


@dataclass
class SchedulerStats:
    """A snapshot the engine core attaches to its outputs."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    num_kv_fetch_reqs_by_stage: dict[str, int] = field(default_factory=dict)
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    iteration_details: dict[str, Any] | None = None
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    connector_prefix_cache_stats: PrefixCacheStats | None = None
    kv_cache_eviction_events: list[tuple[float, float, list[float]]] = field(default_factory=list)
    spec_decoding_stats: dict[str, Any] | None = None
    kv_connector_stats: dict[str, Any] | None = None
    ec_connector_stats: dict[str, Any] | None = None
    waiting_lora_adapters: dict[str, int] = field(default_factory=dict)
    running_lora_adapters: dict[str, int] = field(default_factory=dict)
    cudagraph_stats: dict[str, Any] | None = None
    perf_stats: dict[str, Any] | None = None


@dataclass
class RequestStateStats:
    """One request's timing; `*_ts` are monotonic seconds, `arrival_time` is wall clock."""

    num_generation_tokens: int = 0
    num_preemptions: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    is_corrupted: bool = False
    is_watermarked: bool = False
    is_watermark_skipped: bool = False


@dataclass
class FinishedRequestStats:
    """What is known of a request once it has ended; times in seconds."""

    finish_reason: FinishReason
    request_id: str | None = None
    e2e_latency: float = 0.0
    num_prompt_tokens: int = 0
    num_preemptions: int = 0
    num_generation_tokens: int = 0
    max_tokens_param: int | None = None
    queued_time: float = 0.0
    prefill_time: float = 0.0
    inference_time: float = 0.0
    decode_time: float = 0.0
    mean_time_per_output_token: float = 0.0
    is_corrupted: bool = False
    num_cached_tokens: int = 0


@dataclass
class PromptTokenStats:
    """Prompt tokens of one iteration by origin."""

    computed: int = 0
    local_cache_hit: int = 0
    external_kv_transfer: int = 0
    cached_tokens: int = 0
    total: int = 0

    def add(self, prefill: PrefillStats) -> None:
        """Add one request's prefill."""
        self.computed += prefill.num_computed_tokens
        self.local_cache_hit += prefill.num_local_cached_tokens
        self.external_kv_transfer += prefill.num_external_cached_tokens
        self.cached_tokens += prefill.num_cached_tokens
        self.total += prefill.num_prompt_tokens


@dataclass
class IterationStats:
    """What the front end counted while processing one batch of engine outputs."""

    iteration_timestamp: float = field(default_factory=time.time)
    num_generation_tokens: int = 0
    prompt_token_stats: PromptTokenStats = field(default_factory=PromptTokenStats)
    num_preempted_reqs: int = 0
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)
    max_num_generation_tokens_iter: list[int] = field(default_factory=list)
    n_params_iter: list[int] = field(default_factory=list)
    time_to_first_tokens_iter: list[float] = field(default_factory=list)
    inter_token_latencies_iter: list[float] = field(default_factory=list)
    num_corrupted_reqs: int = 0
    num_watermarked_reqs: int = 0
    num_watermark_skipped_reqs: int = 0
    num_not_watermarked_reqs: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens whose prefill ended in this iteration."""
        return self.prompt_token_stats.total
