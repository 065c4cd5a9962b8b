"""Stat loggers: who gets which numbers, when, and what happens when one of them fails."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from prometheus_client import Counter

from hardpoint.contracts.stat_logger import (
    AggregateStatLoggerBase,
    PerEngineStatLoggerFactory,
    StatLoggerBase,
    StatLoggerFactory,
)
from hardpoint.env import envs
from hardpoint.extensions.faults import note_fault
from hardpoint.extensions.groups import load_stat_logger_plugin_factories
from hardpoint.extensions.ledger import Origin, ledger
from hardpoint.front_end.observability.console import AggregatedLoggingStatLogger, LoggingStatLogger
from hardpoint.front_end.observability.prometheus import instrument
from hardpoint.front_end.observability.prometheus_logger import PrometheusStatLogger
from hardpoint.log import init_logger
from hardpoint.types.stats import IterationStats, MultiModalCacheStats, SchedulerStats

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig

__all__ = [
    "AggregateStatLoggerBase",
    "AggregatedLoggingStatLogger",
    "LoggingStatLogger",
    "PerEngineStatLoggerAdapter",
    "PrometheusStatLogger",
    "StatLoggerBase",
    "StatLoggerFactory",
    "StatLoggerManager",
    "load_stat_logger_plugin_factories",
]

logger = init_logger(__name__)

# A logger that fails this often in a row in one of its methods is switched off.
MAX_FAULTS_IN_A_ROW = 10
# Records kept for a logger that is busy writing; more than a minute of steps.
_MAX_HELD_RECORDS = 10_000
_STOP_WAIT_S = 2.0
# A record that takes longer is told of: all requests have waited for it.
_SLOW_RECORD_S = 0.5


class PerEngineStatLoggerAdapter(AggregateStatLoggerBase):
    """One logger per engine behind the interface of one for all."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        engine_indexes: list[int],
        per_engine_stat_logger_factory: PerEngineStatLoggerFactory,
    ) -> None:
        self.engine_indexes = engine_indexes
        self.per_engine_stat_loggers = {
            index: per_engine_stat_logger_factory(vllm_config, index) for index in engine_indexes
        }

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Pass the step on to its engine's logger."""
        one = self.per_engine_stat_loggers.get(engine_idx)
        if one is None:
            logger.warning_once("Unexpected engine_idx %s: its statistics are left out", engine_idx)
            return
        one.record(scheduler_stats, iteration_stats, mm_cache_stats=mm_cache_stats, engine_idx=engine_idx)

    def log(self) -> None:
        """Let each write."""
        for one in self.per_engine_stat_loggers.values():
            one.log()

    def log_engine_initialized(self) -> None:
        """Tell each."""
        for one in self.per_engine_stat_loggers.values():
            one.log_engine_initialized()

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Tell each."""
        for one in self.per_engine_stat_loggers.values():
            one.record_sleep_state(is_awake, level)

    def record_admission_rejection(self, reason: str) -> None:
        """Tell each."""
        for one in self.per_engine_stat_loggers.values():
            one.record_admission_rejection(reason)


class _Isolated:
    """One logger behind a wall: what it raises, and how long it writes, touches nobody else.

    `record` and `log` never run at the same time. While `log` runs (on a thread of its own), records
    are kept and given afterwards.
    """

    def __init__(self, inner: AggregateStatLoggerBase, name: str, origin: Origin | None) -> None:
        self.inner = inner
        self.name = name
        self._origin = origin
        self._entry_point = origin.entry_point if origin is not None else ""
        self._busy = threading.Lock()
        self._held: deque[tuple[str, tuple[Any, ...], dict[str, Any]]] = deque(maxlen=_MAX_HELD_RECORDS)
        self._faults: dict[str, int] = {}
        self._off = False
        self._told_slow = name.startswith("hardpoint.")
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def give(self, method: str, *args: Any, **named: Any) -> None:
        """Call a method now, or keep the call until the logger has finished writing; never waits."""
        if self._off:
            return
        if not self._busy.acquire(blocking=False):
            self._held.append((method, args, named))
            return
        try:
            self._catch_up()
            self._call(method, args, named)
        finally:
            self._busy.release()

    def wait_for(self, method: str) -> None:
        """Call a method without arguments, after the one that runs."""
        if self._off:
            return
        with self._busy:
            self._catch_up()
            self._call(method, (), {})
            self._catch_up()

    def _catch_up(self) -> None:
        while self._held:
            self._call(*self._held.popleft())

    def _call(self, method: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._off:
            return
        began = time.perf_counter()
        try:
            getattr(self.inner, method)(*args, **named)
        except Exception as error:
            self._fault(method, error)
        else:
            self._faults.pop(method, None)
            if method == "record" and not self._told_slow:
                self._tell_slow(time.perf_counter() - began)

    def _tell_slow(self, seconds: float) -> None:
        if seconds < _SLOW_RECORD_S:
            return
        self._told_slow = True
        what = f"record took {seconds:.1f} s, and all requests wait for it"
        fix = "add up in record, and do the slow part in log"
        ledger.record("warn", "stat_loggers", self._entry_point or self.name, origin=self._origin, detail=what, fix=fix)
        logger.warning("stat logger %s: %s. Fix: %s", self.name, what, fix)

    def _fault(self, method: str, error: Exception) -> None:
        count = self._faults[method] = self._faults.get(method, 0) + 1
        _fault_counter().labels(self.name, method).inc()
        if count == 1:
            what = f"{method} raised {type(error).__name__}: {error}"
            note_fault("stat_loggers", self.name, what, self._origin)
            logger.error("stat logger %s: %s; requests go on", self.name, what, exc_info=error)
        if count >= MAX_FAULTS_IN_A_ROW:
            self._off = True
            what = f"switched off after {count} failures of {method} in a row"
            note_fault("stat_loggers", self.name, what, self._origin)
            logger.error("stat logger %s: %s", self.name, what)

    def start(self, interval_s: float) -> None:
        """Let it write every `interval_s` seconds, on a thread of its own."""
        self._thread = threading.Thread(
            target=self._write_regularly, args=(interval_s,), name=f"stats {self.name}", daemon=True
        )
        self._thread.start()

    def _write_regularly(self, interval_s: float) -> None:
        while not self._stop.wait(interval_s):
            self.wait_for("log")
        self.wait_for("log")

    def end(self) -> None:
        """Let the thread write once more and end."""
        self._stop.set()

    def join(self, seconds: float) -> None:
        """Wait for that, and let go of what the logger holds."""
        if self._thread is not None:
            self._thread.join(max(seconds, 0.0))
        if isinstance(self.inner, PrometheusStatLogger):
            self.inner.close()


def _fault_counter() -> Any:
    name = "hardpoint:stat_logger_faults"
    return instrument(name, lambda: Counter(name, "Exceptions a stat logger raised", ("logger", "method")))


class StatLoggerManager:
    """Hands each step's numbers to every stat logger of this front end.

    Order: custom loggers (the caller's, then plugins'), the console logger, Prometheus.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        engine_idxs: list[int] | None = None,
        custom_stat_loggers: Sequence[StatLoggerFactory] | None = None,
        enable_default_loggers: bool = True,
        aggregate_engine_logging: bool = False,
        client_count: int = 1,
    ) -> None:
        self.engine_indexes = list(engine_idxs or [0])
        self._isolated: list[_Isolated] = []
        for factory in custom_stat_loggers or ():
            self._add(vllm_config, factory)
        if enable_default_loggers:
            self._add_console(vllm_config, aggregate_engine_logging, client_count)
        if not any(isinstance(one, PrometheusStatLogger) for one in self.stat_loggers):
            self._add(vllm_config, PrometheusStatLogger)
        if client_count > 1:
            logger.info(
                "statistics of this process cover the requests it serves itself: it is one of %d API servers",
                client_count,
            )

    @property
    def stat_loggers(self) -> list[AggregateStatLoggerBase]:
        """The loggers, those for one engine wrapped in an adapter."""
        return [one.inner for one in self._isolated]

    def _add_console(self, vllm_config: VllmConfig, aggregate: bool, client_count: int) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        if client_count > 1:
            logger.warning("several API servers: the console line is left out, since each would show its part only")
            return
        self._add(vllm_config, AggregatedLoggingStatLogger if aggregate else LoggingStatLogger)

    def _add(self, vllm_config: VllmConfig, factory: StatLoggerFactory) -> None:
        if inspect.isclass(factory) and issubclass(factory, AggregateStatLoggerBase):
            inner: AggregateStatLoggerBase = cast("Any", factory)(
                vllm_config=vllm_config, engine_indexes=self.engine_indexes
            )
        else:
            inner = PerEngineStatLoggerAdapter(
                vllm_config, self.engine_indexes, cast("PerEngineStatLoggerFactory", factory)
            )
        module = getattr(factory, "__module__", "")
        name = f"{module}.{getattr(factory, '__qualname__', type(factory).__qualname__)}"
        self._isolated.append(_Isolated(inner, name, ledger.origin_of_module(module)))

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int | None = None,
    ) -> None:
        """Give one step of one engine to every logger; never waits and never raises."""
        index = engine_idx or 0
        for one in self._isolated:
            one.give("record", scheduler_stats, iteration_stats, mm_cache_stats=mm_cache_stats, engine_idx=index)

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """The engine went to sleep (`sleep` = 1) or woke up."""
        for one in self._isolated:
            one.give("record_sleep_state", 0 if sleep else 1, level)

    def record_admission_rejection(self, reason: str) -> None:
        """A queue limit turned a request away."""
        for one in self._isolated:
            one.give("record_admission_rejection", reason)

    def log_engine_initialized(self) -> None:
        """The engine is ready."""
        for one in self._isolated:
            one.wait_for("log_engine_initialized")

    def log(self) -> None:
        """Let every logger write now. May take as long as the slowest: not for the event loop."""
        for one in self._isolated:
            one.wait_for("log")

    def start(self, interval_s: float | None = None) -> None:
        """Let every logger write regularly, each on a thread of its own.

        interval_s  seconds; None = VLLM_LOG_STATS_INTERVAL; 0 or less = never
        """
        seconds = envs.VLLM_LOG_STATS_INTERVAL if interval_s is None else interval_s
        if seconds > 0:
            for one in self._isolated:
                one.start(seconds)

    def stop(self) -> None:
        """End the threads after a last line each, and take this engine's metrics away.

        A logger that takes too long over its last line is left behind.
        """
        for one in self._isolated:
            one.end()
        ends = time.monotonic() + _STOP_WAIT_S
        for one in self._isolated:
            one.join(ends - time.monotonic())
