"""An engine around a model that can be checked (`hardpoint.testing.checkable_model`)."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from hardpoint.config.sections import CacheConfig, ObservabilityConfig, SchedulerConfig, StructuredOutputsConfig
from hardpoint.contracts.executor import Executor
from hardpoint.contracts.kv_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from hardpoint.contracts.worker_calls import call_worker
from hardpoint.engine_core.kv_cache.hashing import block_hasher, hash_function
from hardpoint.engine_core.request import Request
from hardpoint.engine_core.scheduler.default import Scheduler
from hardpoint.testing.checkable_model import EOS, VOCAB, expected_output, next_token
from hardpoint.testing.checkable_model import CheckableModel as FakeRunner
from hardpoint.types.finish import RequestStatus
from hardpoint.types.messages import EngineCoreOutput, EngineCoreRequest
from hardpoint.types.sampling_params import SamplingParams
from hardpoint.types.schedule import ModelRunnerOutput, SchedulerOutput

__all__ = ["EOS", "VOCAB", "expected_output", "next_token"]


def make_config(
    *, block_size: int = 4, max_model_len: int = 64, prefix_caching: bool = True, **scheduler: Any
) -> SimpleNamespace:
    """The parts of a configuration that the engine core reads."""
    scheduler.setdefault("max_num_batched_tokens", 32)
    scheduler.setdefault("max_num_seqs", 8)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=max_model_len, original_max_model_len=None, skip_tokenizer_init=True
        ),
        scheduler_config=SchedulerConfig(max_model_len=max_model_len, is_encoder_decoder=False, **scheduler),
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=prefix_caching),
        parallel_config=SimpleNamespace(world_size=1, pipeline_parallel_size=1, distributed_executor_backend=None),
        observability_config=ObservabilityConfig(),
        structured_outputs_config=StructuredOutputsConfig(),
        lora_config=None,
        load_config=None,
        device_config=None,
        speculative_config=None,
        profiler_config=SimpleNamespace(profiler=None),
    )


def layer_spec(block_size: int, window: int = 0) -> KVCacheSpec:
    """A layer of one head with one element."""
    sizes = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1, "dtype": "float32"}
    return SlidingWindowSpec(**sizes, sliding_window=window) if window else FullAttentionSpec(**sizes)


def make_scheduler(
    config: SimpleNamespace,
    num_blocks: int,
    *,
    window: int = 0,
    log_stats: bool = False,
    kind: type[Scheduler] = Scheduler,
) -> Scheduler:
    """A scheduler over a pool of `num_blocks`, the null block included."""
    block_size = config.cache_config.block_size
    group = KVCacheGroupSpec(layer_names=["layer"], kv_cache_spec=layer_spec(block_size, window))
    plan = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[group])
    return kind(
        vllm_config=config,
        kv_cache_config=plan,
        structured_output_manager=None,
        block_size=block_size,
        log_stats=log_stats,
    )


def make_request(
    request_id: str, prompt: list[int], *, salt: str | None = None, priority: int = 0, **params: Any
) -> EngineCoreRequest:
    """A request as a front end sends it."""
    params.setdefault("max_tokens", 8)
    params.setdefault("temperature", 0.0)
    sampling = SamplingParams(**params)
    sampling.update_from_generation_config({}, eos_token_id=EOS)
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=float(len(request_id)),
        lora_request=None,
        cache_salt=salt,
        data_parallel_rank=None,
        priority=priority,
    )


class Engine:
    """A scheduler and a fake runner, stepped together, with every output kept.

    in_flight  steps that are planned, and computed, before the result of the first of them is taken in
    """

    def __init__(self, scheduler: Scheduler, *, window: int = 0, in_flight: int = 1) -> None:
        self.scheduler = scheduler
        self.in_flight = in_flight
        self.results: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        config = scheduler.cache_config
        self.runner = FakeRunner(config.block_size, scheduler.kv_cache_config.num_blocks, {}, window)
        self.hasher = block_hasher(config.block_size, hash_function("sha256")) if config.enable_prefix_caching else None
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self.plans: list[SchedulerOutput] = []

    def add(self, request: EngineCoreRequest) -> None:
        self.runner.salts[request.request_id] = request.cache_salt
        added = Request.from_engine_core_request(request, self.hasher)
        assert self.scheduler.why_impossible(added) is None
        self.scheduler.add_request(added)

    @property
    def has_work(self) -> bool:
        return bool(self.results) or self.scheduler.has_requests()

    def step(self) -> SchedulerOutput:
        """Plan until enough steps are in flight or nothing is left to plan, then take in the oldest result."""
        planning = True
        while planning and len(self.results) < self.in_flight and (self.scheduler.has_requests() or not self.results):
            planning = self.plan().total_num_scheduled_tokens > 0
        self.take_in()
        return self.plans[-1]

    def plan(self) -> SchedulerOutput:
        plan = self.scheduler.schedule()
        self.check(plan)
        self.plans.append(plan)
        self.results.append((plan, self.runner.execute(plan)))
        return plan

    def take_in(self) -> None:
        by_client = self.scheduler.update_from_output(*self.results.popleft())
        for batch in by_client.values():
            for output in batch.outputs:
                self.outputs.setdefault(output.request_id, []).append(output)

    def run(self, max_steps: int = 5000) -> None:
        while self.has_work:
            self.step()
            assert len(self.plans) < max_steps, "the engine makes no progress"

    def check(self, plan: SchedulerOutput) -> None:
        """What must hold in every step."""
        scheduler = self.scheduler
        assert plan.total_num_scheduled_tokens <= scheduler.max_num_scheduled_tokens
        assert len(scheduler.running) <= scheduler.max_num_running_reqs
        assert set(plan.num_scheduled_tokens) <= {request.request_id for request in scheduler.running}
        assert all(request.status is RequestStatus.RUNNING for request in scheduler.running)
        self.check_blocks()
        self.check_window(plan)

    def check_window(self, plan: SchedulerOutput) -> None:
        """No request has lost a block that its tokens of this step attend to."""
        for request_id, count in plan.num_scheduled_tokens.items():
            end = self.scheduler.requests[request_id].num_computed_tokens
            first = max(0, end - count - self.runner.window + 1) if self.runner.window else 0
            table = self.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
            size = self.runner.block_size
            assert 0 not in table[first // size : -(-end // size)]

    def check_blocks(self) -> None:
        """Every block has as many users as tables name it, and is free exactly when there is none."""
        manager = self.scheduler.kv_cache_manager
        users: dict[int, int] = {}
        for request_id in self.scheduler.requests:
            for block_id in manager.get_block_ids(request_id)[0]:
                users[block_id] = users.get(block_id, 0) + 1
        users.pop(0, None)
        pool = manager.block_pool
        for block in pool.blocks[1:]:
            assert block.ref_cnt == users.get(block.block_id, 0)
        free = {block.block_id for block in pool._free.blocks()}
        assert len(free) == pool.get_num_free_blocks()
        assert free == {block.block_id for block in pool.blocks[1:] if block.ref_cnt == 0}

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs.get(request_id, []) for token in output.new_token_ids]

    def last(self, request_id: str) -> EngineCoreOutput:
        return self.outputs[request_id][-1]


class FakeWorker:
    """A worker with one layer; `FakeExecutor.worker_class` may name a subclass."""

    free_bytes = 1 << 12

    def __init__(self, config: SimpleNamespace) -> None:
        self.config = config
        self.shut_down = False
        self.lengths: list[int] = []

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return {"layer": layer_spec(self.config.cache_config.block_size)}

    def determine_available_memory(self) -> int:
        return self.free_bytes

    def initialize_from_config(self, plans: list[KVCacheConfig]) -> None:
        self.runner = FakeRunner(self.config.cache_config.block_size, plans[0].num_blocks)

    def compile_or_warm_up_model(self) -> None:
        pass

    def update_max_model_len(self, length: int) -> None:
        self.lengths.append(length)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        return self.runner.execute(plan)

    def shutdown(self) -> None:
        self.shut_down = True


class FakeExecutor(Executor):
    """Calls a `FakeWorker` in this process."""

    worker_class: type[FakeWorker] = FakeWorker

    def _init_executor(self) -> None:
        self.worker = self.worker_class(self.vllm_config)

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False):
        return [call_worker(self.worker, method, args, kwargs, timeout)]

    def check_health(self) -> None:
        pass


def engine(num_blocks: int = 100, *, log_stats: bool = False, **config: Any) -> Engine:
    """An engine around a scheduler with these settings."""
    return Engine(make_scheduler(make_config(**config), num_blocks, log_stats=log_stats))


def answer(plan: SchedulerOutput, tokens: dict[str, list[int]] | None = None, **parts: Any) -> ModelRunnerOutput:
    """What a worker returns for a step: [1] for each request unless `tokens` has others."""
    ids = list(plan.num_scheduled_tokens)
    sampled = [(tokens or {}).get(request_id, [1]) for request_id in ids]
    return ModelRunnerOutput(ids, {request_id: row for row, request_id in enumerate(ids)}, sampled, **parts)


def prefix_hits(core: Engine) -> dict[str, int]:
    """Tokens that each request found computed when it was admitted."""
    return {new.req_id: new.num_computed_tokens for plan in core.plans for new in plan.scheduled_new_reqs}
