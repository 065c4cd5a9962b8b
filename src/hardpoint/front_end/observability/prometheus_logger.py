"""The stat logger that fills the `vllm:` metrics. A metric without a source here is absent, not zero."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from hardpoint.contracts.stat_logger import AggregateStatLoggerBase
from hardpoint.env import envs
from hardpoint.front_end.observability.buckets import families
from hardpoint.front_end.observability.prometheus import engine_metrics
from hardpoint.types.finish import FinishReason
from hardpoint.types.stats import FinishedRequestStats, IterationStats, MultiModalCacheStats, SchedulerStats

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig

_COMMON = ("model_name", "engine")
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
_REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")


class _Row(NamedTuple):
    """One metric: kind, name without the `vllm:`, meaning, extra labels or bucket family."""

    kind: str
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: str = ""


# fmt: off
_ROWS = (
    _Row("gauge", "num_requests_running", "Requests in the running batch"),
    _Row("gauge", "num_requests_waiting", "Requests waiting, for any reason"),
    _Row("gauge", "num_requests_waiting_by_reason", "Requests waiting, by reason", ("reason",)),
    _Row("gauge", "engine_sleep_state", "1 for the state the engine is in", ("sleep_state",)),
    _Row("gauge", "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1"),
    _Row("counter", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
    _Row("counter", "prefix_cache_hits", "Prompt tokens found in the prefix cache"),
    _Row("counter", "num_preemptions", "Preemptions"),
    _Row("counter", "prompt_tokens", "Prompt tokens processed"),
    _Row("counter", "prompt_tokens_by_source", "Prompt tokens by where they came from", ("source",)),
    _Row("counter", "prompt_tokens_cached", "Prompt tokens found in a cache"),
    _Row("counter", "generation_tokens", "Tokens generated"),
    _Row("counter", "request_success", "Finished requests by reason", ("finished_reason",)),
    _Row("histogram", "request_prompt_tokens", "Prompt tokens per request", buckets="request_tokens"),
    _Row("histogram", "request_generation_tokens", "Output tokens per request", buckets="request_tokens"),
    _Row("histogram", "iteration_tokens_total", "Tokens per engine step", buckets="iteration_tokens"),
    _Row("histogram", "request_max_num_generation_tokens", "Longest of the n outputs", buckets="request_tokens"),
    _Row("histogram", "request_params_n", "The n parameter", buckets="request_params_n"),
    _Row("histogram", "request_params_max_tokens", "The max_tokens parameter", buckets="request_tokens"),
    _Row("histogram", "time_to_first_token_seconds", "Arrival to first token", buckets="time_to_first_token"),
    _Row("histogram", "inter_token_latency_seconds", "Gap between outputs", buckets="inter_token_latency"),
    _Row("histogram", "request_time_per_output_token_seconds", "Mean gap per request", buckets="inter_token_latency"),
    _Row("histogram", "e2e_request_latency_seconds", "Arrival to last token", buckets="request_latency"),
    _Row("histogram", "request_queue_time_seconds", "Time waiting", buckets="request_latency"),
    _Row("histogram", "request_inference_time_seconds", "First scheduled to last token", buckets="request_latency"),
    _Row("histogram", "request_prefill_time_seconds", "First scheduled to first token", buckets="request_latency"),
    _Row("histogram", "request_decode_time_seconds", "First to last token", buckets="request_latency"),
    _Row("histogram", "request_prefill_kv_computed_tokens", "Prompt tokens not cached", buckets="request_tokens"),
    _Row("histogram", "request_num_preemptions", "Preemptions per request", buckets="request_num_preemptions"),
)
_RESIDENCY_ROWS = (
    _Row("histogram", "kv_block_lifetime_seconds", "Allocation to eviction of a block", buckets="kv_cache_residency"),
    _Row("histogram", "kv_block_idle_before_evict_seconds", "Last use to eviction", buckets="kv_cache_residency"),
    _Row("histogram", "kv_block_reuse_gap_seconds", "Gap between uses of a block", buckets="kv_cache_residency"),
)
_MEDIA_ROWS = (
    _Row("counter", "mm_cache_queries", "Items of media looked up among those processed before"),
    _Row("counter", "mm_cache_hits", "Items of media found there"),
)
_CORRUPTED_ROW = _Row("counter", "corrupted_requests", "Requests with NaN logits")
# What a finished request adds: metric -> the figure, None where it has none.
_FINISHED: tuple[tuple[str, Callable[[FinishedRequestStats], float | None]], ...] = (
    ("request_prompt_tokens", lambda f: f.num_prompt_tokens),
    ("request_generation_tokens", lambda f: f.num_generation_tokens),
    ("request_params_max_tokens", lambda f: f.max_tokens_param),
    ("request_time_per_output_token_seconds", lambda f: f.mean_time_per_output_token),
    ("e2e_request_latency_seconds", lambda f: f.e2e_latency),
    ("request_queue_time_seconds", lambda f: f.queued_time),
    ("request_inference_time_seconds", lambda f: f.inference_time),
    ("request_prefill_time_seconds", lambda f: f.prefill_time),
    ("request_decode_time_seconds", lambda f: f.decode_time),
    ("request_prefill_kv_computed_tokens", lambda f: f.num_prompt_tokens - f.num_cached_tokens),
    ("request_num_preemptions", lambda f: f.num_preemptions),
)
# fmt: on
_ADAPTER_LABELS = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")


class PrometheusStatLogger(AggregateStatLoggerBase):
    """Fills the `vllm:` metrics of all engines of this front end.

    A subclass may set `_gauge_cls`, `_counter_cls`, `_histogram_cls` to write elsewhere.
    """

    _gauge_cls: Any = Gauge
    _counter_cls: Any = Counter
    _histogram_cls: Any = Histogram

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        self.vllm_config = vllm_config
        self.engine_indexes = list(engine_indexes or [0])
        self.registry = CollectorRegistry()
        served = vllm_config.model_config.served_model_name
        name = served if isinstance(served, str) else (served or [vllm_config.model_config.model])[0]
        self._labels = {index: (name, str(index)) for index in self.engine_indexes}
        self._buckets = families(
            vllm_config.model_config.max_model_len or 1, vllm_config.observability_config.custom_histogram_buckets
        )
        self._with_residency = vllm_config.observability_config.kv_cache_metrics
        self._with_nans = envs.VLLM_COMPUTE_NANS_IN_LOGITS
        rows = _ROWS + (_RESIDENCY_ROWS if self._with_residency else ())
        rows += (_CORRUPTED_ROW,) if self._with_nans else ()
        rows += _MEDIA_ROWS if getattr(vllm_config.model_config, "multimodal_config", None) is not None else ()
        families_made = {row.name: self._make(row, _COMMON + row.labels) for row in rows}
        self._split = {row.name: families_made[row.name] for row in rows if row.labels}
        # Children of unlabelled rows are looked up once: this is called at every step.
        self._of = {
            index: {row.name: families_made[row.name].labels(*labels) for row in rows if not row.labels}
            for index, labels in self._labels.items()
        }
        self._rejections = self._make(
            _Row("counter", "admission_rejections", "Requests refused by a queue limit"), ("model_name", "reason")
        )
        self._adapters = self._make_adapters()
        # Engine -> the labels it shows at present.
        self._shown_adapters: dict[int, tuple[str, ...]] = {}
        self._start_at_zero(name)
        self._show_cache_config()
        engine_metrics.add(self.registry)

    def _make(self, row: _Row, labels: tuple[str, ...]) -> Any:
        kinds = {"gauge": self._gauge_cls, "counter": self._counter_cls, "histogram": self._histogram_cls}
        kind = kinds[row.kind]
        options: dict[str, Any] = {"buckets": self._buckets[row.buckets]} if row.buckets else {}
        if kind in (Gauge, Counter, Histogram):
            options["registry"] = self.registry
        if kind is Gauge:
            options["multiprocess_mode"] = "mostrecent"
        return kind(name=f"vllm:{row.name}", documentation=row.help, labelnames=list(labels), **options)

    def _make_adapters(self) -> Any:
        """The gauge of adapters; None where there are none."""
        if self.vllm_config.lora_config is None:
            return None
        row = _Row("gauge", "lora_requests_info", "Adapters of waiting and running requests; the time they were seen")
        return self._make(row, _ADAPTER_LABELS)

    def _record_adapters(self, stats: SchedulerStats, engine: int) -> None:
        names = [",".join(sorted(found)) for found in (stats.waiting_lora_adapters, stats.running_lora_adapters)]
        labels = (str(self.vllm_config.lora_config.max_loras), *names)  # type: ignore[union-attr]
        before = self._shown_adapters.get(engine)
        # Names come from clients: what is no longer so is taken away, or the series would grow without end.
        if before not in (None, labels) and before not in [v for k, v in self._shown_adapters.items() if k != engine]:
            self._adapters.remove(*before)
        self._shown_adapters[engine] = labels
        self._adapters.labels(*labels).set(time.time())

    def _start_at_zero(self, model_name: str) -> None:
        """Show the label values there can be, so that a rate over them begins at the start."""
        for labels in self._labels.values():
            for finished in FinishReason:
                self._split["request_success"].labels(*labels, str(finished))
            for source in ("local_compute", "local_cache_hit"):
                self._split["prompt_tokens_by_source"].labels(*labels, source)
        for reason in _REJECTIONS:
            self._rejections.labels(model_name, reason)
        self.record_sleep_state(1, 0)

    def _show_cache_config(self) -> None:
        config = self.vllm_config.cache_config
        facts = {f.name: str(getattr(config, f.name)) for f in dataclasses.fields(config)}
        row = _Row("gauge", "cache_config_info", "The cache configuration; always 1")
        info = self._make(row, ("engine", *facts))
        for index in self.engine_indexes:
            info.labels(str(index), *facts.values()).set(1)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Add one step."""
        if scheduler_stats is not None:
            self._record_scheduler(scheduler_stats, engine_idx)
        if iteration_stats is not None:
            self._record_iteration(iteration_stats, engine_idx)
        if mm_cache_stats is not None:
            self._of[engine_idx]["mm_cache_queries"].inc(mm_cache_stats.queries)
            self._of[engine_idx]["mm_cache_hits"].inc(mm_cache_stats.hits)

    def _record_scheduler(self, stats: SchedulerStats, engine: int) -> None:
        of, labels = self._of[engine], self._labels[engine]
        of["num_requests_running"].set(stats.num_running_reqs)
        of["num_requests_waiting"].set(stats.num_waiting_reqs + stats.num_skipped_waiting_reqs)
        waiting = self._split["num_requests_waiting_by_reason"]
        waiting.labels(*labels, "capacity").set(stats.num_waiting_reqs)
        waiting.labels(*labels, "deferred").set(stats.num_skipped_waiting_reqs)
        of["kv_cache_usage_perc"].set(stats.kv_cache_usage)
        if self._adapters is not None:
            self._record_adapters(stats, engine)
        of["prefix_cache_queries"].inc(stats.prefix_cache_stats.queries)
        of["prefix_cache_hits"].inc(stats.prefix_cache_stats.hits)
        if self._with_residency:
            for lifetime, idle, gaps in stats.kv_cache_eviction_events:
                of["kv_block_lifetime_seconds"].observe(lifetime)
                of["kv_block_idle_before_evict_seconds"].observe(idle)
                for gap in gaps:
                    of["kv_block_reuse_gap_seconds"].observe(gap)

    def _record_iteration(self, stats: IterationStats, engine: int) -> None:
        of = self._of[engine]
        of["num_preemptions"].inc(stats.num_preempted_reqs)
        of["generation_tokens"].inc(stats.num_generation_tokens)
        of["iteration_tokens_total"].observe(stats.num_prompt_tokens + stats.num_generation_tokens)
        if stats.num_prompt_tokens:
            self._record_prompts(stats, engine)
        if self._with_nans:
            of["corrupted_requests"].inc(stats.num_corrupted_reqs)
        for name, values in (
            ("request_max_num_generation_tokens", stats.max_num_generation_tokens_iter),
            ("request_params_n", stats.n_params_iter),
            ("time_to_first_token_seconds", stats.time_to_first_tokens_iter),
            ("inter_token_latency_seconds", stats.inter_token_latencies_iter),
        ):
            for value in values:
                of[name].observe(value)
        for finished in stats.finished_requests:
            self._record_finished(finished, engine)

    def _record_prompts(self, stats: IterationStats, engine: int) -> None:
        of, labels, tokens = self._of[engine], self._labels[engine], stats.prompt_token_stats
        of["prompt_tokens"].inc(tokens.total)
        of["prompt_tokens_cached"].inc(tokens.cached_tokens)
        by_source = self._split["prompt_tokens_by_source"]
        by_source.labels(*labels, "local_compute").inc(tokens.computed)
        by_source.labels(*labels, "local_cache_hit").inc(tokens.local_cache_hit)
        if tokens.external_kv_transfer:
            by_source.labels(*labels, "external_kv_transfer").inc(tokens.external_kv_transfer)

    def _record_finished(self, finished: FinishedRequestStats, engine: int) -> None:
        self._split["request_success"].labels(*self._labels[engine], str(finished.finish_reason)).inc()
        of = self._of[engine]
        for name, figure in _FINISHED:
            value = figure(finished)
            if value is not None:
                of[name].observe(value)

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Show which of the three states the engines are in."""
        state = "awake" if is_awake else _SLEEP_STATES[min(max(level, 1), 2)]
        for labels in self._labels.values():
            for known in _SLEEP_STATES:
                self._split["engine_sleep_state"].labels(*labels, known).set(known == state)

    def record_admission_rejection(self, reason: str) -> None:
        """Count a request a queue limit turned away."""
        name = next(iter(self._labels.values()))[0]
        self._rejections.labels(name, reason).inc()

    def log_engine_initialized(self) -> None:
        """Show the cache configuration as the engine settled it."""
        # The number of blocks is only known once the engine has started.
        info = self.registry._names_to_collectors.get("vllm:cache_config_info")
        if info is not None:
            self.registry.unregister(info)
            self._show_cache_config()

    def close(self) -> None:
        """Take this engine's metrics out of the process's exposition."""
        engine_metrics.remove(self.registry)
