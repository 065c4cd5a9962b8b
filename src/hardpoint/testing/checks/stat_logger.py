"""The suite for stat loggers."""

from __future__ import annotations

import copy
from typing import Any

from hardpoint.contracts.stat_logger import AggregateStatLoggerBase, StatLoggerBase
from hardpoint.testing.failures import explained, name_of, require, require_call, require_class, require_sync
from hardpoint.testing.tiny_config import tiny_vllm_config
from hardpoint.types.finish import FinishReason
from hardpoint.types.stats import FinishedRequestStats, IterationStats, PromptTokenStats, SchedulerStats

_METHODS = ("record", "log", "log_engine_initialized", "record_sleep_state", "record_admission_rejection")
_RECORD = "record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0)"


def check_stat_logger(cls: Any, vllm_config: Any = None) -> None:
    """Build the logger for two engines and take it through the life of a server.

    vllm_config  what the constructor gets; a configuration of a tiny model unless given
    """
    subject = require_class(cls, StatLoggerBase)
    require_sync(cls, subject, *_METHODS)
    require_call(cls.record, subject, _RECORD, None, None, None, mm_cache_stats=None, engine_idx=0)
    config = vllm_config or tiny_vllm_config()
    for logger in _built(cls, subject, config):
        _live(logger, subject)


def _built(cls: Any, subject: str, config: Any) -> list[Any]:
    fix = "see the constructor of the contract"
    if issubclass(cls, AggregateStatLoggerBase):
        shape = "__init__(self, vllm_config, engine_indexes)"
        require_call(cls.__init__, subject, shape, None, vllm_config=config, engine_indexes=[0, 1])
        with explained(subject, "the constructor, for two engines,", fix):
            return [cls(vllm_config=config, engine_indexes=[0, 1])]
    shape = "__init__(self, vllm_config, engine_index=0)"
    require_call(cls.__init__, subject, shape, None, config, 0)
    with explained(subject, "the constructor, once for each of two engines,", fix):
        return [cls(config, 0), cls(config, 1)]


def _live(logger: Any, subject: str) -> None:
    with explained(subject, "log_engine_initialized", "it is called once, before any record"):
        logger.log_engine_initialized()
    with explained(
        subject, "log, before anything is recorded,", "it runs every few seconds, also while nothing happens"
    ):
        logger.log()
    for scheduler, iteration in _steps():
        given = copy.deepcopy((scheduler, iteration))
        with explained(subject, f"record of {_told(scheduler, iteration)}", "either of the two may be None"):
            logger.record(scheduler, iteration, mm_cache_stats=None, engine_idx=0)
        require(
            (scheduler, iteration) == given,
            subject,
            "record changes the statistics it is given, which other loggers get as well",
            "copy what is to be kept",
        )
    with explained(subject, "log", "it writes what was recorded since the last call"):
        logger.log()
    with explained(subject, "record_sleep_state", "it takes (is_awake, level)"):
        logger.record_sleep_state(0, 1)
        logger.record_sleep_state(1, 0)
    with explained(subject, "record_admission_rejection", "it takes the name of the limit"):
        logger.record_admission_rejection("max_num_queued_reqs")


def _steps() -> list[tuple[SchedulerStats | None, IterationStats | None]]:
    """Steps as a server has them: idle, a prefill, decoding, a request that ends."""
    prefill = IterationStats(
        prompt_token_stats=PromptTokenStats(computed=5, total=5),
        num_generation_tokens=1,
        time_to_first_tokens_iter=[0.1],
    )
    ended = FinishedRequestStats(FinishReason.STOP, "r0", e2e_latency=0.5, num_prompt_tokens=5, num_generation_tokens=3)
    decode = IterationStats(num_generation_tokens=1, inter_token_latencies_iter=[0.02], finished_requests=[ended])
    return [
        (None, None),
        (SchedulerStats(), None),
        (SchedulerStats(num_running_reqs=1, kv_cache_usage=0.1), prefill),
        (None, decode),
        (SchedulerStats(step_counter=3), IterationStats()),
    ]


def _told(scheduler: Any, iteration: Any) -> str:
    return f"{'a snapshot' if scheduler else 'no snapshot'} and {name_of(iteration) if iteration else 'no iteration'}"
