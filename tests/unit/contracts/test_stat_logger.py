import inspect

import pytest

from hardpoint.contracts.stat_logger import AggregateStatLoggerBase, StatLoggerBase


class Smallest(StatLoggerBase):
    """What the smallest plugins written for vLLM have."""

    def __init__(self, vllm_config, engine_idx=0):
        self.seen = []

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        self.seen.append(engine_idx)

    def log_engine_initialized(self):
        pass


def test_three_methods_are_enough():
    logger = Smallest(None)
    logger.record(None, None, mm_cache_stats=None, engine_idx=3)
    logger.log()
    logger.record_sleep_state(1, 0)
    logger.record_admission_rejection("max_num_queued_reqs")
    assert logger.seen == [3]


def test_less_is_refused_when_it_is_built():
    with pytest.raises(TypeError, match="abstract"):
        type("Less", (StatLoggerBase,), {"record": lambda self: None})(None)


def test_signatures_are_those_plugins_override():
    record = inspect.signature(StatLoggerBase.record)
    assert list(record.parameters) == ["self", "scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"]
    assert list(inspect.signature(StatLoggerBase.__init__).parameters)[1:] == ["vllm_config", "engine_index"]
    assert list(inspect.signature(AggregateStatLoggerBase.__init__).parameters)[1:] == ["vllm_config", "engine_indexes"]
