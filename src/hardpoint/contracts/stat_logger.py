"""Receiving the engine's statistics: what a stat-logger plugin implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from hardpoint.types.stats import IterationStats, MultiModalCacheStats, SchedulerStats

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig


class StatLoggerBase(ABC):
    """Receives the statistics of one engine.

    Built   in the front end, once per engine index, after the engine has started.
    Called  log_engine_initialized: once. record: after each batch of engine outputs, on the event loop.
            log: every VLLM_LOG_STATS_INTERVAL seconds, on a thread of the logger's own. Never two at
            a time: steps that end while log runs are recorded afterwards, in order.
    Blocks  record must not: requests wait while it runs. log may.
    Fault   what the constructor raises stops the start. What a method raises is logged and counted;
            a logger that keeps raising is switched off, and requests go on.
    """

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None: ...

    @abstractmethod
    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Take the numbers of one step; any of them may be None. The last two come by keyword."""

    @abstractmethod
    def log_engine_initialized(self) -> None:
        """The engine is ready."""

    def log(self) -> None:  # noqa: B027 - optional
        """Write what was recorded since the last call."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:  # noqa: B027 - optional
        """The engine went to sleep or woke up."""

    def record_admission_rejection(self, reason: str) -> None:  # noqa: B027 - optional
        """A request was turned away: reason `max_num_queued_reqs` or `max_num_queued_tokens`."""


class AggregateStatLoggerBase(StatLoggerBase):
    """Receives the statistics of all engines of this front end, in one object.

    Built with the keywords `vllm_config` and `engine_indexes`; `record` tells engines apart by
    `engine_idx`. Otherwise as StatLoggerBase.
    """

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None: ...


PerEngineStatLoggerFactory = Callable[["VllmConfig", int], StatLoggerBase]
AggregateStatLoggerFactory = type[AggregateStatLoggerBase]
StatLoggerFactory = AggregateStatLoggerFactory | PerEngineStatLoggerFactory
