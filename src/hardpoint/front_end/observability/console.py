"""The line about throughput, queue and cache that appears every few seconds."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from hardpoint.contracts.stat_logger import AggregateStatLoggerBase, StatLoggerBase
from hardpoint.front_end.observability.caching import CachingMetrics
from hardpoint.log import init_logger
from hardpoint.types.stats import IterationStats, MultiModalCacheStats, SchedulerStats

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig

logger = init_logger(__name__)


class LoggingStatLogger(StatLoggerBase):
    """Writes one engine's figures: at INFO while there is work, at DEBUG when there is none."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.vllm_config = vllm_config
        self.engine_index = engine_index
        self.prefix_caching_metrics = CachingMetrics()
        self.mm_caching_metrics = CachingMetrics()
        self.last_scheduler_stats = SchedulerStats()
        self._was_idle = False
        self._start_interval()

    def _start_interval(self) -> None:
        self._began = time.monotonic()
        self._prompt_tokens = self._generation_tokens = self._preemptions = 0

    @property
    def log_prefix(self) -> str:
        """Whose figures these are."""
        return f"Engine {self.engine_index}: "

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Add one step."""
        if iteration_stats is not None:
            self._prompt_tokens += iteration_stats.prompt_token_stats.computed
            self._generation_tokens += iteration_stats.num_generation_tokens
            self._preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None:
            self.prefix_caching_metrics.observe(scheduler_stats.prefix_cache_stats)
            self.last_scheduler_stats = scheduler_stats
        if mm_cache_stats is not None:
            self.mm_caching_metrics.observe(mm_cache_stats)

    def log(self) -> None:
        """Write the figures since the last call."""
        seconds = max(time.monotonic() - self._began, 1e-6)
        prompt, generation = self._prompt_tokens / seconds, self._generation_tokens / seconds
        stats = self.last_scheduler_stats
        waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        idle = not (self._prompt_tokens or self._generation_tokens or stats.num_running_reqs or waiting)
        parts = [
            f"prompt {prompt:.1f} tokens/s, generation {generation:.1f} tokens/s",
            f"running {stats.num_running_reqs}, waiting {waiting}",
            f"KV cache {stats.kv_cache_usage * 100:.1f} % used",
            f"prefix cache {self.prefix_caching_metrics.hit_rate * 100:.1f} % hit",
        ]
        if not self.mm_caching_metrics.empty:
            parts.append(f"media cache {self.mm_caching_metrics.hit_rate * 100:.1f} % hit")
        if self._preemptions:
            parts.append(f"{self._preemptions} preemptions")
        # One line after the last work shows the figures going to zero; then quiet.
        level = logging.DEBUG if idle and self._was_idle else logging.INFO
        logger.log(level, "%s%s", self.log_prefix, ", ".join(parts))
        self._was_idle = idle
        self._start_interval()

    def log_engine_initialized(self) -> None:
        """Say how much cache there is."""
        cache = self.vllm_config.cache_config
        if cache.num_gpu_blocks:
            logger.debug("%sKV cache of %d blocks", self.log_prefix, cache.num_gpu_blocks)


class AggregatedLoggingStatLogger(LoggingStatLogger, AggregateStatLoggerBase):
    """The same as one line over all engines of this front end (`--aggregate-engine-logging`)."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        LoggingStatLogger.__init__(self, vllm_config, -1)
        self.engine_indexes = list(engine_indexes)
        self._by_engine = {index: SchedulerStats() for index in engine_indexes}

    @property
    def log_prefix(self) -> str:
        """How many engines the figures cover."""
        return f"{len(self.engine_indexes)} engines: "

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Add one step of one engine."""
        if engine_idx not in self._by_engine:
            logger.warning_once("Unexpected engine_idx %s: its statistics are left out", engine_idx)
            return
        super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
        if scheduler_stats is not None:
            self._by_engine[engine_idx] = scheduler_stats

    def log(self) -> None:
        """Write the sums over the engines; the cache figure is their mean."""
        every = list(self._by_engine.values())
        self.last_scheduler_stats = SchedulerStats(
            num_running_reqs=sum(stats.num_running_reqs for stats in every),
            num_waiting_reqs=sum(stats.num_waiting_reqs for stats in every),
            num_skipped_waiting_reqs=sum(stats.num_skipped_waiting_reqs for stats in every),
            kv_cache_usage=sum(stats.kv_cache_usage for stats in every) / max(len(every), 1),
        )
        super().log()
