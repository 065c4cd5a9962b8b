"""The engine core over a fake executor: requests in, outputs out, and calls by name."""

from __future__ import annotations

import logging
import threading
import time

import pytest
from engine_fakes import FakeExecutor, FakeWorker, expected_output, make_config, make_request

from hardpoint import platforms
from hardpoint.contracts.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheConfigBuilder
from hardpoint.contracts.scheduler import SchedulerInterface
from hardpoint.engine_core.kv_cache import planning
from hardpoint.engine_core.scheduler.default import Scheduler
from hardpoint.engine_core.step import EngineCore
from hardpoint.errors import ConfigError, PluginError
from hardpoint.types.finish import FinishReason
from hardpoint.types.lora_request import LoRARequest
from hardpoint.types.messages import EngineCoreOutput
from hardpoint.types.pooling_params import PoolingParams
from hardpoint.types.sampling_params import SamplingParams, StructuredOutputsParams


def executor_of(worker: type[FakeWorker]) -> type[FakeExecutor]:
    return type("Executor", (FakeExecutor,), {"worker_class": worker})


def make_core(worker: type[FakeWorker] = FakeWorker, **config) -> EngineCore:
    return EngineCore(make_config(**config), executor_of(worker), log_stats=False)


def run(core: EngineCore, steps: int | None = None) -> dict[str, list[EngineCoreOutput]]:
    outputs: dict[str, list[EngineCoreOutput]] = {}
    done = 0
    while core.has_work() and done != steps:
        for batch in core.step()[0].values():
            for output in batch.outputs:
                outputs.setdefault(output.request_id, []).append(output)
        done += 1
        assert done < 500
    return outputs


def tokens(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


# Requests.


def test_requests_run_to_their_end():
    core = make_core()
    request = make_request("a", [1, 2, 3])
    core.add_request(request)
    assert core.get_request_counts() == (0, 1)
    assert tokens(run(core)["a"]) == expected_output([1, 2, 3], request.sampling_params, 64)
    assert not core.has_work()
    assert core.step() == ({}, False)


def refused(name: str, prompt: list[int] | None = None, **changes):
    request = make_request("bad", [1, 2] if prompt is None else prompt)
    for field, value in changes.items():
        setattr(request, field, value)
    return pytest.param(request, name, id=name)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        refused("prompt embeddings", prompt_embeds=[[0.0]]),
        refused("media in prompts", mm_features=["image"]),
        refused("without adapters", lora_request=LoRARequest("a", 1, "/a")),
        refused("streamed input", resumable=True),
        refused("KV cache hints", kv_hints={"x": 1}),
        refused("KV transfer parameters", sampling_params=SamplingParams(extra_args={"kv_transfer_params": {"a": 1}})),
        refused("encoder-cache", sampling_params=SamplingParams(extra_args={"ec_transfer_params": {"a": 1}})),
        refused("no prompt", prompt_token_ids=None),
        refused("no sampling parameters", sampling_params=None),
        refused("the task 'embed'", sampling_params=None, pooling_params=PoolingParams(task="embed")),
        refused("no token", prompt=[]),
        refused("context length of 64", prompt=[1] * 64),
    ],
)
def test_what_cannot_be_served_is_answered_by_name_and_hurts_nobody(request_, reason):
    core = make_core()
    core.add_request(make_request("good", [1, 2, 3]))
    request_.client_index = 2
    core.add_request(request_)
    outputs, _ = core.step()
    (refusal,) = outputs[2].outputs
    assert (refusal.request_id, refusal.finish_reason) == ("bad", FinishReason.ERROR)
    assert reason in refusal.error
    assert run(core)["good"][-1].finish_reason is not FinishReason.ERROR


def test_a_refusal_alone_is_work():
    core = make_core()
    core.add_request(make_request("bad", []))
    assert core.has_work()
    outputs, executed = core.step()
    assert outputs[0].outputs[0].finish_reason is FinishReason.ERROR
    assert not executed
    assert not core.has_work()


def test_structured_outputs_without_a_tokenizer_are_refused():
    core = make_core()
    request = make_request("bad", [1])
    request.sampling_params.structured_outputs = StructuredOutputsParams(regex="a")
    core.add_request(request)
    (refusal,) = run(core)["bad"]
    assert "--skip-tokenizer-init" in refusal.error
    assert refusal.refused_parameter == "structured_outputs"


def test_an_id_in_use_is_an_error_of_the_caller():
    core = make_core()
    core.add_request(make_request("a", [1]))
    with pytest.raises(ValueError, match="'a' is in use"):
        core.add_request(make_request("a", [2]))
    assert len(tokens(run(core)["a"])) > 0
    core.add_request(make_request("a", [2]))
    assert run(core)["a"]


def test_aborts_are_silent_and_immediate_aborts_are_not():
    core = make_core()
    core.add_request(make_request("a", [1], ignore_eos=True))
    run(core, steps=1)
    core.abort_requests(["a", "unknown"])
    assert run(core) == {}
    request = make_request("b", [1])
    request.abort_immediately = True
    core.add_request(request)
    assert run(core)["b"][0].finish_reason is FinishReason.ABORT


# Failures.


def test_a_step_that_fails_is_reported_and_ends_the_loop(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hardpoint"), "propagate", True)

    class Broken(FakeWorker):
        def execute_model(self, plan):
            raise RuntimeError("device lost")

    core = make_core(Broken)
    core.add_request(make_request("a", [1, 2]))
    with pytest.raises(RuntimeError, match="device lost"):
        core.step()
    assert "a step with 2 tokens of 1 requests failed: RuntimeError: device lost" in caplog.text


def test_a_scheduler_that_raises_ends_the_loop():
    class Raising(Scheduler):
        def schedule(self, throttle_prefills=False):
            raise RuntimeError("no plan today")

    core = make_core(scheduler_cls=Raising)
    core.add_request(make_request("a", [1]))
    with pytest.raises(RuntimeError, match="no plan today"):
        core.step()


def test_a_start_that_fails_ends_the_workers():
    made = []

    class Small(FakeWorker):
        free_bytes = 10

        def __init__(self, config):
            super().__init__(config)
            made.append(self)

    with pytest.raises(ConfigError):
        make_core(Small)
    assert made[0].shut_down


def test_worker_failures_are_passed_on():
    failed = threading.Event()

    class Watched(FakeExecutor):
        def register_failure_callback(self, callback):
            callback()

    EngineCore(make_config(), Watched, False, failed.set)
    assert failed.is_set()


# Calls by name.


class Extended(FakeWorker):
    go_on = threading.Event()

    def ok(self, a, b=0):
        return [a, b]

    def boom(self):
        raise LookupError("nothing there")

    def slow(self):
        self.go_on.wait(60)


def test_collective_rpc_calls_methods_and_functions():
    core = make_core(Extended)
    assert core.collective_rpc("ok", args=(1,), kwargs={"b": 2}) == [[1, 2]]
    assert core.collective_rpc(lambda worker, x: (type(worker), x), args=(5,)) == [(Extended, 5)]


@pytest.mark.parametrize(
    ("method", "error", "text"),
    [
        ("boom", LookupError, "nothing there"),
        ("unknown", NotImplementedError, "Method 'unknown' is not implemented"),
        ("__init__", NotImplementedError, "is not implemented"),
        ("shut_down", NotImplementedError, "is not implemented"),
        (7, TypeError, "a name or a callable, got int"),
    ],
)
def test_collective_rpc_errors_reach_the_caller_and_the_engine_lives(method, error, text):
    core = make_core(Extended)
    with pytest.raises(error, match=text):
        core.collective_rpc(method, timeout=60)
    with pytest.raises(error, match=text):
        core.collective_rpc(method)
    core.add_request(make_request("a", [1]))
    assert run(core)["a"]


def test_collective_rpc_keeps_its_limit_and_requests_go_on():
    core = make_core(Extended)
    core.add_request(make_request("a", [1], ignore_eos=True))
    run(core, steps=2)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"'slow' did not finish within 0\.2 s"):
        core.collective_rpc("slow", timeout=0.2)
    assert time.monotonic() - began < 30
    assert run(core)["a"][-1].finish_reason is FinishReason.LENGTH
    Extended.go_on.set()


def test_what_is_not_there_is_refused_by_name():
    core = make_core()
    assert core.is_sleeping() is False
    assert core.list_loras() == set()
    for call, name in (
        (lambda: core.sleep(), "sleep mode"),
        (lambda: core.wake_up(), "sleep mode"),
    ):
        with pytest.raises(NotImplementedError, match=f"{name}.* not supported"):
            call()
    with pytest.raises(ValueError, match="profiling is not configured"):
        core.profile()


# Pausing.


def test_pause_abort_ends_everything_with_a_word():
    core = make_core()
    core.add_request(make_request("a", [1], ignore_eos=True))
    run(core, steps=1)
    core.add_request(make_request("b", [1], ignore_eos=True))
    assert core.pause_scheduler("abort") is None
    assert core.is_scheduler_paused()
    outputs = run(core)
    assert {name: output[-1].finish_reason for name, output in outputs.items()} == {
        "a": FinishReason.ABORT,
        "b": FinishReason.ABORT,
    }
    core.add_request(make_request("c", [1]))
    assert run(core) == {}
    core.resume_scheduler()
    assert not core.is_scheduler_paused()
    assert run(core)["c"]


def test_pause_wait_is_done_when_running_requests_are():
    core = make_core()
    core.add_request(make_request("a", [1], ignore_eos=True))
    run(core, steps=1)
    core.add_request(make_request("b", [1], ignore_eos=True))
    drained = core.pause_scheduler("wait")
    assert not drained.done()
    outputs = run(core)
    assert set(outputs) == {"a"}
    assert drained.done()
    assert core.get_request_counts() == (0, 1)
    core.resume_scheduler()
    assert len(tokens(run(core)["b"])) == 8


def test_pause_wait_without_running_requests_is_done_at_once():
    core = make_core()
    assert core.pause_scheduler("wait") is None
    assert core.is_scheduler_paused()


def test_a_resumed_wait_does_not_hang():
    core = make_core()
    core.add_request(make_request("a", [1], ignore_eos=True))
    run(core, steps=1)
    drained = core.pause_scheduler("wait")
    core.resume_scheduler()
    assert drained.done()


@pytest.mark.parametrize("clear_cache", [True, False])
def test_pause_keep_freezes_and_goes_on_where_it_was(clear_cache):
    core = make_core()
    request = make_request("a", [1, 2, 3], ignore_eos=True)
    core.add_request(request)
    before = run(core, steps=3)["a"]
    core.pause_scheduler("keep", clear_cache=clear_cache)
    assert run(core) == {}
    core.resume_scheduler()
    after = run(core)["a"]
    assert tokens(before + after) == expected_output([1, 2, 3], request.sampling_params, 64)


def test_an_unknown_pause_mode_is_refused():
    with pytest.raises(ValueError, match="abort, wait, keep"):
        make_core().pause_scheduler("stop")


# Schedulers and plans from outside.


def test_a_scheduler_of_ones_own_is_used_and_warned_about(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hardpoint"), "propagate", True)

    class Counting(Scheduler):
        steps = 0

        def schedule(self, throttle_prefills=False):
            Counting.steps += 1
            return super().schedule(throttle_prefills)

    core = make_core(scheduler_cls=Counting)
    assert "its interface is not public" in caplog.text
    core.add_request(make_request("a", [1]))
    run(core)
    assert Counting.steps > 0
    caplog.clear()
    make_core()
    assert "its interface is not public" not in caplog.text


@pytest.mark.parametrize(
    ("scheduler_cls", "error", "text"),
    [
        ("no_such_package.Scheduler", ConfigError, "there is no module 'no_such_package'"),
        ("hardpoint.engine_core.scheduler.default.Nothing", ConfigError, "has no attribute 'Nothing'"),
        (dict, PluginError, "is not a SchedulerInterface"),
        ("collections.OrderedDict", PluginError, "is not a SchedulerInterface"),
    ],
)
def test_a_scheduler_that_cannot_be_used_is_named(scheduler_cls, error, text):
    with pytest.raises(error, match=text):
        make_core(scheduler_cls=scheduler_cls)


def test_the_scheduler_contract_declares_what_is_read_of_it():
    for name in ("connector", "ec_connector", "kv_cache_manager"):
        assert getattr(SchedulerInterface, name) is None


class FixedBuilder(KVCacheConfigBuilder):
    def build(self, kv_cache_specs, available_memory):
        plans = planning.DefaultKVCacheConfigBuilder(self.vllm_config).build(kv_cache_specs, available_memory)
        return [
            KVCacheConfig(num_blocks=30, kv_cache_tensors=[], kv_cache_groups=plan.kv_cache_groups) for plan in plans
        ]


class UnevenBuilder(FixedBuilder):
    def build(self, kv_cache_specs, available_memory):
        return super().build(kv_cache_specs, available_memory) * 2


class NotABuilder:
    pass


@pytest.fixture
def platform(monkeypatch):
    """A platform that is the real one but for its builder: `platform.builder` names it."""

    class Planning(type(platforms.current_platform)):
        builder: str | None = None
        registered = 0

        @classmethod
        def get_kv_cache_config_builder_cls(cls):
            return cls.builder

        @classmethod
        def register_custom_kv_cache_specs(cls, vllm_config):
            cls.registered += 1

    monkeypatch.setattr(platforms, "_chosen", {0: Planning()})
    return Planning


def test_a_platform_may_plan_the_cache(platform):
    platform.builder = f"{__name__}.FixedBuilder"
    core = make_core()
    assert core.vllm_config.cache_config.num_gpu_blocks == 30
    assert core.scheduler.kv_cache_manager.block_pool.num_blocks == 30
    assert platform.registered == 1


@pytest.mark.parametrize(("builder", "text"), [("UnevenBuilder", "2 plans for 1 workers"), ("NotABuilder", "not a KV")])
def test_a_builder_that_breaks_its_contract_is_named(platform, builder, text):
    platform.builder = f"{__name__}.{builder}"
    with pytest.raises(PluginError, match=text):
        make_core()


# The plan in the config.


def test_the_plan_is_noted_in_the_config():
    core = make_core()
    cache = core.vllm_config.cache_config
    page = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=1, dtype="float32").page_size_bytes
    assert cache.num_gpu_blocks == FakeWorker.free_bytes // page == 128
    assert cache.kv_cache_size_tokens == 127 * 4
    assert cache.kv_cache_max_concurrency == pytest.approx(127 / 16)
    assert cache.hash_block_size == cache.cache_hit_alignment_tokens == cache.block_size == 4


def test_the_length_is_fitted_to_memory_when_that_is_asked_for():
    config = make_config(max_model_len=10_000)
    config.model_config.original_max_model_len = -1
    core = EngineCore(config, FakeExecutor, False)
    assert config.model_config.max_model_len == 127 * 4
    assert core.model_executor.worker.lengths == [127 * 4]
    assert core.scheduler.max_model_len == 127 * 4
