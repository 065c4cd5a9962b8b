"""The suite for stat loggers accepts good ones and says what is wrong with bad ones."""

from __future__ import annotations

import pytest

from hardpoint.contracts.stat_logger import AggregateStatLoggerBase, StatLoggerBase
from hardpoint.testing import ContractFailure, check_stat_logger


class Good(StatLoggerBase):
    def __init__(self, vllm_config, engine_index=0):
        self.tokens = 0
        assert vllm_config.model_config.get_vocab_size() > 0

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        if iteration_stats is not None:
            self.tokens += iteration_stats.num_generation_tokens

    def log_engine_initialized(self):
        pass


class GoodAggregate(AggregateStatLoggerBase):
    def __init__(self, vllm_config, engine_indexes):
        self.engines = engine_indexes

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        assert engine_idx in self.engines

    def log_engine_initialized(self):
        pass


def without(name):
    return type("Bad", (StatLoggerBase,), {k: v for k, v in vars(Good).items() if k not in (name, "__dict__")})


def with_method(name, method):
    return type("Bad", (Good,), {name: method})


async def coroutine(self, *args, **kwargs): ...


def record_none(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
    iteration_stats.num_generation_tokens  # noqa: B018 - None has no such thing


def record_changes(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
    if scheduler_stats is not None:
        scheduler_stats.num_running_reqs = 99


def log_too_early(self):
    1 / self.tokens


@pytest.mark.parametrize("cls", [Good, GoodAggregate])
def test_good_ones(cls):
    check_stat_logger(cls)


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (Good.record, "it is not a class"),
        (dict, "does not derive from hardpoint.contracts.stat_logger.StatLoggerBase"),
        (without("record"), "does not implement record"),
        (with_method("record", lambda self, scheduler_stats, iteration_stats: None), "cannot be called as the host"),
        (with_method("record", coroutine), "record is a coroutine function"),
        (with_method("__init__", lambda self: None), "cannot be called as the host calls it"),
        (with_method("__init__", lambda self, config, index: 1 / index), "the constructor.* raises ZeroDivisionError"),
        (with_method("record", record_none), "record of no snapshot and no iteration raises AttributeError"),
        (with_method("record", record_changes), "record changes the statistics"),
        (with_method("log", log_too_early), "log, before anything is recorded, raises ZeroDivisionError"),
        (with_method("record_sleep_state", lambda self: None), "record_sleep_state raises TypeError"),
    ],
)
def test_bad_ones(bad, what):
    with pytest.raises(ContractFailure, match=what) as caught:
        check_stat_logger(bad)
    assert caught.value.fix
    assert "Fix: " in str(caught.value)
