"""The `vllm:` metrics: names, labels, values; several engines in one process; snapshots."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hardpoint.config.sections import LoRAConfig
from hardpoint.errors import ConfigError
from hardpoint.front_end.observability.buckets import FAMILIES, families, request_tokens
from hardpoint.front_end.observability.caching import CachingMetrics
from hardpoint.front_end.observability.prometheus import exposition
from hardpoint.front_end.observability.prometheus_logger import PrometheusStatLogger
from hardpoint.front_end.observability.reader import Counter, Gauge, Histogram, Vector, get_metrics_snapshot
from hardpoint.types.finish import FinishReason
from hardpoint.types.stats import (
    FinishedRequestStats,
    IterationStats,
    PrefixCacheStats,
    PromptTokenStats,
    SchedulerStats,
)


def make_config(name="served", **observability):
    @dataclass
    class CacheConfig:
        block_size: int = 16
        num_gpu_blocks: int | None = None

    given = {"custom_histogram_buckets": None, "kv_cache_metrics": False, **observability}
    return SimpleNamespace(
        model_config=SimpleNamespace(model="m", served_model_name=[name, "other"], max_model_len=64),
        cache_config=CacheConfig(),
        lora_config=None,
        observability_config=SimpleNamespace(**given),
    )


@pytest.fixture
def make():
    made = []

    def build(*args, engines=None, **options):
        logger = PrometheusStatLogger(make_config(*args, **options), engines)
        made.append(logger)
        return logger

    yield build
    for logger in made:
        logger.close()


def scraped() -> dict:
    """(sample name, labels) -> value of the `vllm:` part."""
    found = {}
    for family in text_string_to_metric_families(exposition().decode()):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in found, f"{key} is there twice"
                found[key] = sample.value
    return found


def value(name, engine="0", model="served", **labels):
    return scraped()[name, frozenset({"model_name": model, "engine": engine, **labels}.items())]


def full_step():
    finished = FinishedRequestStats(
        FinishReason.LENGTH, e2e_latency=2.0, num_prompt_tokens=10, num_generation_tokens=7, max_tokens_param=7,
        queued_time=0.1, prefill_time=0.2, inference_time=1.5, decode_time=1.3, mean_time_per_output_token=0.2,
        num_cached_tokens=4, num_preemptions=1,
    )  # fmt: skip
    scheduler = SchedulerStats(
        num_running_reqs=3, num_waiting_reqs=2, num_skipped_waiting_reqs=1, kv_cache_usage=0.5,
        prefix_cache_stats=PrefixCacheStats(requests=1, queries=10, hits=4),
    )  # fmt: skip
    iteration = IterationStats(
        num_generation_tokens=7, num_preempted_reqs=1, finished_requests=[finished],
        prompt_token_stats=PromptTokenStats(computed=6, local_cache_hit=4, cached_tokens=4, total=10),
        max_num_generation_tokens_iter=[7], n_params_iter=[1], time_to_first_tokens_iter=[0.3],
        inter_token_latencies_iter=[0.1, 0.2],
    )  # fmt: skip
    return scheduler, iteration


def test_a_step_shows_in_every_metric(make):
    make().record(*full_step())
    assert value("vllm:num_requests_running") == 3
    assert value("vllm:num_requests_waiting") == 3
    assert value("vllm:num_requests_waiting_by_reason", reason="capacity") == 2
    assert value("vllm:num_requests_waiting_by_reason", reason="deferred") == 1
    assert value("vllm:kv_cache_usage_perc") == 0.5
    assert value("vllm:prefix_cache_queries_total") == 10
    assert value("vllm:prefix_cache_hits_total") == 4
    assert value("vllm:num_preemptions_total") == 1
    assert value("vllm:prompt_tokens_total") == 10
    assert value("vllm:prompt_tokens_by_source_total", source="local_compute") == 6
    assert value("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 4
    assert value("vllm:prompt_tokens_cached_total") == 4
    assert value("vllm:generation_tokens_total") == 7
    assert value("vllm:request_success_total", finished_reason="length") == 1
    assert value("vllm:request_success_total", finished_reason="stop") == 0
    for name, total in {
        "request_prompt_tokens": 10, "request_generation_tokens": 7, "iteration_tokens_total": 17,
        "request_max_num_generation_tokens": 7, "request_params_n": 1, "request_params_max_tokens": 7,
        "time_to_first_token_seconds": 0.3, "inter_token_latency_seconds": 0.3,
        "request_time_per_output_token_seconds": 0.2, "e2e_request_latency_seconds": 2.0,
        "request_queue_time_seconds": 0.1, "request_inference_time_seconds": 1.5, "request_prefill_time_seconds": 0.2,
        "request_decode_time_seconds": 1.3, "request_prefill_kv_computed_tokens": 6, "request_num_preemptions": 1,
    }.items():  # fmt: skip
        assert value(f"vllm:{name}_sum") == pytest.approx(total), name
        assert value(f"vllm:{name}_count") == (2 if "inter" in name else 1)


def test_what_has_no_source_is_absent(make):
    make()
    names = {name for name, _ in scraped()}
    for absent in ("spec_decode", "lora", "kv_offload", "external_prefix", "mm_cache", "corrupted", "kv_block", "nixl"):
        assert not [name for name in names if absent in name], absent


def test_optional_metrics_come_with_their_switches(make, monkeypatch):
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    logger = make(kv_cache_metrics=True)
    logger.record(
        SchedulerStats(kv_cache_eviction_events=[(3.0, 1.0, [0.5, 0.25])]), IterationStats(num_corrupted_reqs=2)
    )
    assert value("vllm:kv_block_lifetime_seconds_sum") == 3
    assert value("vllm:kv_block_idle_before_evict_seconds_count") == 1
    assert value("vllm:kv_block_reuse_gap_seconds_count") == 2
    assert value("vllm:corrupted_requests_total") == 2


def test_rejections_and_sleep_state(make):
    logger = make()
    logger.record_admission_rejection("max_num_queued_reqs")
    key = (
        "vllm:admission_rejections_total",
        frozenset({"model_name": "served", "reason": "max_num_queued_reqs"}.items()),
    )
    assert scraped()[key] == 1
    assert value("vllm:engine_sleep_state", sleep_state="awake") == 1
    logger.record_sleep_state(0, 2)
    assert value("vllm:engine_sleep_state", sleep_state="awake") == 0
    assert value("vllm:engine_sleep_state", sleep_state="discard_all") == 1


def test_cache_config_is_shown_as_the_engine_settled_it(make):
    logger = make()
    logger.vllm_config.cache_config.num_gpu_blocks = 77
    logger.log_engine_initialized()
    (labels,) = [dict(labels) for name, labels in scraped() if name == "vllm:cache_config_info"]
    assert labels == {"engine": "0", "block_size": "16", "num_gpu_blocks": "77"}


def test_engines_are_told_apart(make):
    logger = make(engines=[0, 1])
    logger.record(*full_step(), engine_idx=1)
    assert value("vllm:generation_tokens_total", engine="1") == 7
    assert value("vllm:generation_tokens_total", engine="0") == 0


def test_two_engines_in_one_process(make):
    first, second = make("a"), make("b")
    first.record(*full_step())
    assert value("vllm:generation_tokens_total", model="a") == 7
    assert value("vllm:generation_tokens_total", model="b") == 0
    # The same labels: counts add up, and nothing is shown twice.
    twin = make("a")
    twin.record(*full_step())
    assert value("vllm:generation_tokens_total", model="a") == 14
    assert value("vllm:e2e_request_latency_seconds_count", model="a") == 2
    assert value("vllm:num_requests_running", model="a") == 3
    twin.close()
    first.close()
    assert not [labels for _, labels in scraped() if ("model_name", "a") in labels]
    second.record(*full_step())
    assert value("vllm:generation_tokens_total", model="b") == 7


def test_dropped_engine_takes_its_metrics_along():
    PrometheusStatLogger(make_config("gone"))
    gc.collect()
    assert not [labels for _, labels in scraped() if ("model_name", "gone") in labels]


def test_subclass_may_write_elsewhere():
    made = []

    class Elsewhere:
        def __init__(self, name, documentation, labelnames, **more):
            made.append((name, tuple(labelnames), more))

        def labels(self, *values):
            return self

        def set(self, value):
            pass

    class Mine(PrometheusStatLogger):
        _gauge_cls = _counter_cls = _histogram_cls = Elsewhere

    Mine(make_config()).close()
    assert ("vllm:num_requests_running", ("model_name", "engine"), {}) in made
    assert any(name == "vllm:e2e_request_latency_seconds" and "buckets" in more for name, _, more in made)


# -- buckets ------------------------------------------------------------------------------------------


def test_token_bounds_follow_the_context():
    assert request_tokens(64) == [1, 2, 5, 10, 20, 50]
    assert request_tokens(100)[-1] == 100
    assert request_tokens(0) == [1]


def test_custom_bounds_replace_a_family(make):
    make(custom_histogram_buckets={"request_latency": [1, 2]})
    bounds = {dict(labels)["le"] for name, labels in scraped() if name == "vllm:e2e_request_latency_seconds_bucket"}
    assert bounds == {"1.0", "2.0", "+Inf"}
    assert families(64, None)["time_to_first_token"] == list(FAMILIES["time_to_first_token"])


@pytest.mark.parametrize("custom", [{"nothing": [1]}, {"request_latency": []}, {"request_latency": [2, 1]}])
def test_wrong_bounds_are_a_config_error(custom):
    with pytest.raises(ConfigError, match="--custom-histogram-buckets"):
        families(64, custom)


# -- snapshots ----------------------------------------------------------------------------------------


def test_snapshot_gives_plain_objects(make):
    make().record(*full_step())
    found = {(type(metric), metric.name): metric for metric in get_metrics_snapshot()}
    assert found[Gauge, "vllm:num_requests_running"].value == 3
    assert found[Gauge, "vllm:num_requests_running"].labels == {"model_name": "served", "engine": "0"}
    assert found[Counter, "vllm:generation_tokens"].value == 7
    latency = found[Histogram, "vllm:e2e_request_latency_seconds"]
    assert (latency.count, latency.sum) == (1, 2.0)
    assert latency.buckets["1.5"] == 0
    assert latency.buckets["2.0"] == latency.buckets["+Inf"] == 1


def test_counters_by_position_are_vectors():
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    counter = prometheus_client.Counter("vllm:by_pos", "x", ["model_name", "position"], registry=registry)
    counter.labels("m", "0").inc(3)
    counter.labels("m", "2").inc(1)
    assert get_metrics_snapshot(registry) == [Vector("vllm:by_pos", {"model_name": "m"}, [3, 0, 1])]


# -- hit rates ----------------------------------------------------------------------------------------


def test_hit_rate_covers_recent_requests():
    metrics = CachingMetrics(max_recent_requests=2)
    assert metrics.empty
    assert metrics.hit_rate == 0.0
    for hits in (0, 10, 10):
        metrics.observe(PrefixCacheStats(requests=1, queries=10, hits=hits))
    assert metrics.hit_rate == 1.0
    metrics.observe(PrefixCacheStats(reset=True))
    assert metrics.empty


def test_adapters_are_shown_as_they_are_now_only():
    engine = make_config("lora")
    engine.lora_config = LoRAConfig(max_loras=3)
    logger = PrometheusStatLogger(engine, [0, 1])

    def shown() -> list[tuple[str, str]]:
        """(waiting, running) of each series."""
        found = []
        for (name, labels), value in scraped().items():
            if name == "vllm:lora_requests_info":
                assert dict(labels)["max_lora"] == "3"
                assert value == pytest.approx(time.time(), abs=60)
                found.append((dict(labels)["waiting_lora_adapters"], dict(labels)["running_lora_adapters"]))
        return found

    try:
        logger.record(SchedulerStats(waiting_lora_adapters={"c": 1}, running_lora_adapters={"b": 2, "a": 1}), None)
        assert shown() == [("c", "a,b")]
        for engine_idx in (0, 1):
            logger.record(SchedulerStats(), None, engine_idx=engine_idx)
        assert shown() == [("", "")]
        logger.record(SchedulerStats(running_lora_adapters={"a": 1}), None, engine_idx=1)
        assert sorted(shown()) == [("", ""), ("", "a")]
    finally:
        logger.close()
