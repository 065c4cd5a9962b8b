"""The stat logger manager: who is called how, and what a bad logger can do (B19)."""

from __future__ import annotations

import logging
import threading
import time
from types import SimpleNamespace

import pytest

from hardpoint.contracts.stat_logger import AggregateStatLoggerBase, StatLoggerBase
from hardpoint.extensions.ledger import ledger
from hardpoint.front_end.observability import loggers
from hardpoint.front_end.observability.loggers import (
    MAX_FAULTS_IN_A_ROW,
    AggregatedLoggingStatLogger,
    LoggingStatLogger,
    PerEngineStatLoggerAdapter,
    PrometheusStatLogger,
    StatLoggerManager,
)
from hardpoint.types.stats import IterationStats, PrefixCacheStats, PromptTokenStats, SchedulerStats


def make_config(**changes):
    from dataclasses import dataclass

    @dataclass
    class CacheConfig:
        block_size: int = 16
        num_gpu_blocks: int | None = 100
        cache_dtype: str = "auto"

    config = SimpleNamespace(
        model_config=SimpleNamespace(model="m", served_model_name="served", max_model_len=64),
        cache_config=CacheConfig(),
        lora_config=None,
        observability_config=SimpleNamespace(custom_histogram_buckets=None, kv_cache_metrics=False),
    )
    for name, value in changes.items():
        section, _, field = name.partition("__")
        setattr(getattr(config, section), field, value)
    return config


class Recorder(StatLoggerBase):
    """Notes each call with the thread it came on."""

    made: list[Recorder] = []

    def __init__(self, vllm_config, engine_index=0):
        self.engine_index = engine_index
        self.calls: list[tuple] = []
        self.threads: set[str] = set()
        Recorder.made.append(self)

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        self.calls.append(("record", scheduler_stats, iteration_stats, mm_cache_stats, engine_idx))

    def log_engine_initialized(self):
        self.calls.append(("log_engine_initialized",))

    def log(self):
        self.threads.add(threading.current_thread().name)
        self.calls.append(("log",))

    def record_sleep_state(self, is_awake, level):
        self.calls.append(("record_sleep_state", is_awake, level))

    def record_admission_rejection(self, reason):
        self.calls.append(("record_admission_rejection", reason))


class Whole(AggregateStatLoggerBase):
    def __init__(self, vllm_config, engine_indexes):
        self.engine_indexes = engine_indexes
        self.seen = []

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        self.seen.append(engine_idx)

    def log_engine_initialized(self):
        pass


@pytest.fixture(autouse=True)
def clean():
    Recorder.made = []
    ledger.clear()
    ours = logging.getLogger("hardpoint")
    before = ours.propagate, ours.level
    ours.propagate = True
    ours.setLevel("INFO")
    yield
    ours.propagate, ours.level = before
    ledger.clear()


@pytest.fixture
def managers():
    made = []

    def make(*custom, config=None, **options):
        options.setdefault("enable_default_loggers", False)
        manager = StatLoggerManager(config or make_config(), custom_stat_loggers=list(custom), **options)
        made.append(manager)
        return manager

    yield make
    for manager in made:
        manager.stop()


def wait_for(condition, seconds=60.0):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.005)


def test_one_logger_per_engine_is_built_positionally_and_called_by_keyword(managers):
    manager = managers(Recorder, engine_idxs=[0, 2])
    assert [one.engine_index for one in Recorder.made] == [0, 2]
    manager.log_engine_initialized()
    scheduler, iteration = SchedulerStats(), IterationStats()
    manager.record(scheduler, iteration, engine_idx=2)
    manager.record(None, None)
    first, second = Recorder.made
    assert first.calls == [("log_engine_initialized",), ("record", None, None, None, 0)]
    assert second.calls == [("log_engine_initialized",), ("record", scheduler, iteration, None, 2)]


def test_unknown_engine_is_dropped_with_a_warning(managers, caplog):
    manager = managers(Recorder)
    manager.record(None, None, engine_idx=9)
    assert Recorder.made[0].calls == []
    assert "engine_idx 9" in caplog.text


def test_aggregate_class_is_built_once_by_keyword(managers):
    manager = managers(Whole, engine_idxs=[1, 3])
    (whole,) = [one for one in manager.stat_loggers if isinstance(one, Whole)]
    assert whole.engine_indexes == [1, 3]
    manager.record(None, None, engine_idx=3)
    assert whole.seen == [3]


def test_factory_function_is_adapted(managers):
    manager = managers(lambda config, index: Recorder(config, index))
    assert isinstance(manager.stat_loggers[0], PerEngineStatLoggerAdapter)


def test_order_and_default_loggers(managers):
    kinds = [type(one) for one in managers(Recorder, Whole, enable_default_loggers=True).stat_loggers]
    assert kinds == [PerEngineStatLoggerAdapter, Whole, PerEngineStatLoggerAdapter, PrometheusStatLogger]
    several = managers(enable_default_loggers=True, aggregate_engine_logging=True, engine_idxs=[0, 1])
    assert [type(one) for one in several.stat_loggers] == [AggregatedLoggingStatLogger, PrometheusStatLogger]
    assert [type(one) for one in managers().stat_loggers] == [PrometheusStatLogger]


def test_own_prometheus_class_takes_the_place_of_ours(managers):
    class Mine(PrometheusStatLogger):
        pass

    assert [type(one) for one in managers(Mine).stat_loggers] == [Mine]


def test_several_servers_each_say_whose_share_they_show(managers, caplog):
    with caplog.at_level("INFO"):
        manager = managers(enable_default_loggers=True, client_count=2)
    assert [type(one) for one in manager.stat_loggers] == [PrometheusStatLogger]
    assert "one of 2 API servers" in caplog.text


def test_all_hooks_reach_adapted_loggers(managers):
    manager = managers(Recorder)
    manager.record_sleep_state(1, 2)
    manager.record_admission_rejection("max_num_queued_reqs")
    assert Recorder.made[0].calls == [
        ("record_sleep_state", 0, 2),
        ("record_admission_rejection", "max_num_queued_reqs"),
    ]


def test_log_is_called_regularly_on_another_thread(managers):
    manager = managers(Recorder)
    manager.start(0.02)
    (one,) = Recorder.made
    wait_for(lambda: one.calls.count(("log",)) >= 3)
    assert threading.current_thread().name not in one.threads


def test_interval_comes_from_the_environment(managers, monkeypatch):
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0.02")
    managers(Recorder).start()
    wait_for(lambda: ("log",) in Recorder.made[0].calls)
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0")
    before = threading.active_count()
    managers(Recorder).start()
    assert threading.active_count() == before


def test_stop_writes_once_more_and_ends_the_threads(managers):
    manager = managers(Recorder)
    manager.start(60)
    manager.record(None, IterationStats(num_generation_tokens=4))
    manager.stop()
    assert Recorder.made[0].calls[-1] == ("log",)
    assert not [t for t in threading.enumerate() if t.name.startswith("stats ")]


def test_slow_logger_is_left_behind_at_the_end(managers, monkeypatch):
    monkeypatch.setattr(loggers, "_STOP_WAIT_S", 0.1)
    go_on = threading.Event()

    class Slow(Recorder):
        def log(self):
            go_on.wait(60)

    manager = managers(Slow, Recorder)
    manager.start(60)
    started = time.monotonic()
    manager.stop()
    assert time.monotonic() - started < 30
    assert ("log",) in Recorder.made[1].calls
    go_on.set()
    wait_for(lambda: not [t for t in threading.enumerate() if t.name.startswith("stats ")])


def test_raising_record_is_told_once_and_hurts_nobody(managers, caplog):
    class Bad(Recorder):
        def record(self, *args, **named):
            super().record(*args, **named)
            if len(self.calls) == 3:
                raise RuntimeError("third time")

    manager = managers(Bad, Recorder)
    for _ in range(5):
        manager.record(None, IterationStats())
    bad, good = Recorder.made
    assert len(bad.calls) == len(good.calls) == 5
    said = [record for record in caplog.records if "third time" in record.getMessage()]
    assert [record.levelname for record in said] == ["ERROR"]
    (entry,) = ledger.entries(kind="fault", key="stat_loggers")
    assert "record raised RuntimeError: third time" in entry.detail


@pytest.mark.parametrize("limit_s", [0.0, 1e6])
def test_a_record_that_holds_requests_up_is_told_of_once(managers, caplog, monkeypatch, limit_s):
    monkeypatch.setattr("hardpoint.front_end.observability.loggers._SLOW_RECORD_S", limit_s)
    before = len(ledger.entries(kind="warn", key="stat_loggers"))
    manager = managers(Recorder)
    for _ in range(3):
        manager.record(None, IterationStats())
    told = ledger.entries(kind="warn", key="stat_loggers")[before:]
    assert len(told) == caplog.text.count("all requests wait for it") == (limit_s == 0)
    assert all(entry.name.endswith("Recorder") and "do the slow part in log" in entry.fix for entry in told)


def test_always_raising_logger_is_switched_off(managers, caplog):
    class Bad(Recorder):
        def record(self, *args, **named):
            super().record(*args, **named)
            raise RuntimeError("it is broken")

    manager = managers(Bad)
    for _ in range(3 * MAX_FAULTS_IN_A_ROW):
        manager.record(None, IterationStats())
    assert len(Recorder.made[0].calls) == MAX_FAULTS_IN_A_ROW
    assert sum("it is broken" in record.getMessage() for record in caplog.records) == 1
    assert "switched off" in caplog.text
    assert [entry.detail for entry in ledger.entries(kind="fault")][-1].startswith("switched off")


def test_faults_are_counted_in_the_metrics(managers):
    from hardpoint.front_end.observability.prometheus import exposition

    class Bad(Recorder):
        def log(self):
            raise ValueError("no")

    manager = managers(Bad)
    manager.log()
    lines = [
        line for line in exposition().decode().splitlines() if line.startswith("hardpoint:stat_logger_faults_total")
    ]
    assert any("Bad" in line and 'method="log"' in line for line in lines)


def test_raising_log_does_not_end_the_timer(managers):
    class Bad(Recorder):
        def log(self):
            super().log()
            if len(self.calls) % 2:
                raise RuntimeError("now and then")

    manager = managers(Bad)
    manager.start(0.01)
    wait_for(lambda: len(Recorder.made[0].calls) >= 6)


def test_slow_log_delays_nobody_and_loses_nothing(managers):
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Recorder):
        inside = False

        def log(self):
            self.inside = True
            begun.set()
            go_on.wait(60)
            self.inside = False
            super().log()

        def record(self, *args, **named):
            assert not self.inside, "record while log runs"
            super().record(*args, **named)

    manager = managers(Slow, Recorder)
    manager.start(0.01)
    slow, other = Recorder.made
    assert begun.wait(60)
    started = time.monotonic()
    for count in range(100):
        manager.record(None, IterationStats(num_generation_tokens=count))
    manager.record_admission_rejection("max_num_queued_reqs")
    assert time.monotonic() - started < 30, "the caller waited"
    assert not [call for call in slow.calls if call[0] == "record"]
    wait_for(lambda: other.calls.count(("log",)) >= 2)
    go_on.set()
    wait_for(lambda: len([call for call in slow.calls if call[0] == "record"]) == 100)
    given = [call[2].num_generation_tokens for call in slow.calls if call[0] == "record"]
    assert given == list(range(100)), "out of order"
    assert ("record_admission_rejection", "max_num_queued_reqs") in slow.calls
    assert not [entry for entry in ledger.entries(kind="fault")]


def test_constructor_errors_stop_the_start():
    class Bad(Recorder):
        def __init__(self, vllm_config, engine_index=0):
            raise LookupError("cannot be built")

    with pytest.raises(LookupError):
        StatLoggerManager(make_config(), custom_stat_loggers=[Bad])


def test_names_of_plugin_authors_are_here():
    for name in (
        "StatLoggerBase", "AggregateStatLoggerBase", "LoggingStatLogger", "PrometheusStatLogger", "StatLoggerFactory",
        "load_stat_logger_plugin_factories",
    ):  # fmt: skip
        assert hasattr(loggers, name)


# -- the console line ---------------------------------------------------------------------------------


def step(prompt=0, generated=0, **scheduler):
    cache = PrefixCacheStats(requests=1, queries=10, hits=5)
    tokens = PromptTokenStats(computed=prompt, total=prompt)
    return (
        SchedulerStats(prefix_cache_stats=cache, **scheduler),
        IterationStats(num_generation_tokens=generated, prompt_token_stats=tokens),
    )


def test_line_shows_throughput_queue_and_cache(caplog):
    one = LoggingStatLogger(make_config(), 1)
    one._began -= 10
    one.record(*step(prompt=100, generated=50, num_running_reqs=2, num_waiting_reqs=1, kv_cache_usage=0.25))
    with caplog.at_level("INFO"):
        one.log()
    line = caplog.records[-1].getMessage()
    assert line.startswith("Engine 1: ")
    for part in ("prompt 10.0", "generation 5.0", "running 2", "waiting 1", "25.0 % used", "50.0 % hit"):
        assert part in line


def test_idle_engine_falls_silent(caplog):
    one = LoggingStatLogger(make_config())
    with caplog.at_level("DEBUG", logger="hardpoint"):
        one.record(*step(generated=5))
        one.log()
        one.record(SchedulerStats(), None)
        one.log()
        one.log()
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "DEBUG"]


def test_aggregate_line_sums_over_engines(caplog):
    one = AggregatedLoggingStatLogger(make_config(), [0, 1])
    one._began -= 10
    one.record(*step(generated=50, num_running_reqs=2, kv_cache_usage=0.2), engine_idx=0)
    one.record(*step(generated=50, num_running_reqs=3, kv_cache_usage=0.4), engine_idx=1)
    one.record(*step(generated=50, num_running_reqs=9), engine_idx=7)
    with caplog.at_level("INFO"):
        one.log()
    line = caplog.records[-1].getMessage()
    for part in ("2 engines: ", "generation 10.0", "running 5", "30.0 % used"):
        assert part in line
