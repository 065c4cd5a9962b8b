"""The suite for schedulers: they plan for a model that notices every wrong plan."""

from __future__ import annotations

from collections import deque
from typing import Any

from hardpoint.config.sections import VllmConfig
from hardpoint.contracts.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from hardpoint.contracts.scheduler import PauseState, SchedulerInterface
from hardpoint.engine_core.kv_cache.hashing import block_hasher, hash_function
from hardpoint.engine_core.request import Request
from hardpoint.testing.checkable_model import EOS, CheckableModel, expected_output
from hardpoint.testing.failures import explained, require, require_call, require_class
from hardpoint.testing.tiny_config import tiny_vllm_config
from hardpoint.types.finish import RequestStatus
from hardpoint.types.messages import EngineCoreRequest
from hardpoint.types.sampling_params import SamplingParams
from hardpoint.types.schedule import ModelRunnerOutput, SchedulerOutput
from hardpoint.types.stats import SchedulerStats

_BLOCK, _LENGTH, _BUDGET, _REQUESTS = 4, 64, 24, 4
_MOST_STEPS = 2000
_PLAN = "see SchedulerOutput for what the fields mean"


def check_scheduler(cls: Any) -> None:
    """Schedule requests that share prefixes, wait, are preempted, aborted and paused, and check every answer."""
    subject = require_class(cls, SchedulerInterface)
    _check_keywords(cls, subject)
    # One that supports it is also asked for the next plan before the result of the last one is in.
    for in_flight in (1, 2) if _plans_ahead(cls, subject) else (1,):
        for spare_blocks in (64, 4):
            _run_mix(cls, subject, spare_blocks, in_flight)
        _abort(cls, subject, in_flight)
        _pause(cls, subject, in_flight)


def _plans_ahead(cls: Any, subject: str) -> bool:
    with explained(subject, "supports_async_scheduling", "it is a class method without arguments"):
        answer = cls.supports_async_scheduling()
    require(isinstance(answer, bool), subject, f"supports_async_scheduling gives {answer!r}", "return True or False")
    return answer


def _check_keywords(cls: Any, subject: str) -> None:
    shape = "__init__(self, vllm_config, kv_cache_config, structured_output_manager, block_size, ...), see the contract"
    require_call(cls.__init__, subject, shape, None, vllm_config=None, kv_cache_config=None, block_size=_BLOCK,
                 structured_output_manager=None, hash_block_size=_BLOCK, include_finished_set=False,
                 log_stats=True)  # fmt: skip
    require_call(cls.schedule, subject, "schedule(self, throttle_prefills=False)", None)
    require_call(cls.finish_requests, subject, "finish_requests(self, request_ids, finished_status)", None, ["a"],
                 RequestStatus.FINISHED_ABORTED)  # fmt: skip


class _Engine:
    """A scheduler and the model it plans for.

    in_flight  steps that are planned, and computed, before the result of the first of them is given back
    """

    def __init__(self, cls: Any, subject: str, num_blocks: int, in_flight: int = 1) -> None:
        self.subject = subject
        self.in_flight = in_flight
        self.results: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        config = _config()
        spec = FullAttentionSpec(block_size=_BLOCK, num_kv_heads=1, head_size=1, dtype="float32")
        group = KVCacheGroupSpec(layer_names=["layer"], kv_cache_spec=spec)
        plan = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[group])
        with explained(subject, "the constructor", "it is called with keywords, see the contract"):
            self.scheduler = cls(
                vllm_config=config,
                kv_cache_config=plan,
                structured_output_manager=None,
                include_finished_set=False,
                log_stats=True,
                block_size=_BLOCK,
                hash_block_size=_BLOCK,
            )
        self.model = CheckableModel(_BLOCK, num_blocks)
        self.hasher = block_hasher(_BLOCK, hash_function("sha256"))
        self.tokens: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.steps = 0

    def add(self, request_id: str, prompt: list[int], **params: Any) -> SamplingParams:
        sampling = SamplingParams(temperature=0.0, **params)
        sampling.update_from_generation_config({}, eos_token_id=EOS)
        made = EngineCoreRequest(
            request_id=request_id, prompt_token_ids=prompt, mm_features=None, sampling_params=sampling,
            pooling_params=None, arrival_time=float(len(self.tokens)), lora_request=None, cache_salt=None,
            data_parallel_rank=None,
        )  # fmt: skip
        self.tokens[request_id] = []
        with explained(self.subject, "add_request", "it takes a hardpoint.engine_core.request.Request"):
            self.scheduler.add_request(Request.from_engine_core_request(made, self.hasher))
        return sampling

    def step(self) -> int:
        """Plan until enough steps are in flight, then give the oldest result back; how many tokens were planned."""
        total, planning = 0, True
        while planning and len(self.results) < self.in_flight:
            if self.results and not self.scheduler.has_requests():
                break
            planned = self._plan()
            total += planned
            planning = planned > 0
        with explained(self.subject, "update_from_output", "it gets the plan and what the workers made of it"):
            by_client = self.scheduler.update_from_output(*self.results.popleft())
        for batch in by_client.values():
            for output in batch.outputs:
                self.tokens[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self.ended.add(output.request_id)
        self.steps += 1
        require(self.steps < _MOST_STEPS, self.subject, "it makes no progress", "run a waiting request when one fits")
        return total

    def _plan(self) -> int:
        with explained(self.subject, "schedule", _PLAN):
            plan = self.scheduler.schedule()
        total = plan.total_num_scheduled_tokens
        require(total <= _BUDGET, self.subject, f"a step has {total} tokens of {_BUDGET}", "keep to the token budget")
        count = len(plan.num_scheduled_tokens)
        require(count <= _REQUESTS, self.subject, f"a step has {count} requests", "keep to max_num_seqs")
        with explained(self.subject, "a worker that follows its plan", _PLAN):
            self.results.append((plan, self.model.execute(plan)))
        return total

    def run(self) -> None:
        while self.results or self.scheduler.has_requests():
            self.step()

    def check_idle(self) -> None:
        counts = self.scheduler.get_request_counts()
        require(
            tuple(counts) == (0, 0) and self.scheduler.get_num_unfinished_requests() == 0,
            self.subject,
            f"with no request left it counts {counts} running and waiting",
            "forget requests that have ended",
        )
        require(
            not self.model.tokens,
            self.subject,
            f"the workers were never told that {', '.join(self.model.tokens)} ended",
            "put ended requests into finished_req_ids of the next plan, and has_finished_requests until then",
        )
        cleared = self.scheduler.reset_prefix_cache()
        require(cleared is True, self.subject, f"reset_prefix_cache gives {cleared!r} while idle", "free all blocks")
        stats = self.scheduler.make_stats()
        right = stats is None or isinstance(stats, SchedulerStats)
        require(right, self.subject, f"make_stats gives {stats!r}", "return SchedulerStats or None")
        with explained(self.subject, "shutdown", "it is called once, at the end"):
            self.scheduler.shutdown()

    def check_answer(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        expected = expected_output(prompt, params, _LENGTH)
        require(
            self.tokens[request_id] == expected and request_id in self.ended,
            self.subject,
            f"{request_id} gets {len(self.tokens[request_id])} tokens, not the {len(expected)} it gets alone",
            "give each request's outputs to it, in order, and end it where its parameters say",
        )


def _config() -> VllmConfig:
    return tiny_vllm_config(
        block_size=_BLOCK,
        max_model_len=_LENGTH,
        max_num_batched_tokens=_BUDGET,
        max_num_seqs=_REQUESTS,
        enable_prefix_caching=True,
    )


def _prompts() -> list[list[int]]:
    """Some longer than a step's budget, some with a common beginning."""
    lengths = (5, 30, 40, 17, 33, 9, 40, 1)
    return [[(n % 2) * 50 + place % 11 for place in range(length)] for n, length in enumerate(lengths)]


def _run_mix(cls: Any, subject: str, spare_blocks: int, in_flight: int) -> None:
    """All requests get what they get alone, with room for all of them and with room for little more than one."""
    engine = _Engine(cls, subject, 1 + _LENGTH // _BLOCK + spare_blocks, in_flight)
    asked = {}
    for number, prompt in enumerate(_prompts()):
        params = engine.add(f"r{number}", prompt, max_tokens=20, ignore_eos=number % 2 == 0)
        asked[f"r{number}"] = (prompt, params)
        engine.step()
    engine.run()
    for request_id, (prompt, params) in asked.items():
        engine.check_answer(request_id, prompt, params)
    engine.check_idle()


def _abort(cls: Any, subject: str, in_flight: int) -> None:
    engine = _Engine(cls, subject, 64, in_flight)
    prompts = _prompts()[:4]
    params = [engine.add(f"r{number}", prompt, max_tokens=30) for number, prompt in enumerate(prompts)]
    for _ in range(3):
        engine.step()
    with explained(subject, "finish_requests", "it takes ids, some of which may be unknown"):
        ended = engine.scheduler.finish_requests(["r0", "unknown"], RequestStatus.FINISHED_ABORTED)
    found = [request.request_id for request in ended]
    require(found == ["r0"], subject, f"finish_requests returns {found}", "return the requests that it ended")
    engine.run()
    for number in (1, 2, 3):
        engine.check_answer(f"r{number}", prompts[number], params[number])
    with explained(subject, "finish_requests of all", "None stands for every request"):
        engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    engine.check_idle()


def _pause(cls: Any, subject: str, in_flight: int) -> None:
    engine = _Engine(cls, subject, 64, in_flight)
    prompt = _prompts()[0]
    params = engine.add("r0", prompt, max_tokens=5)
    engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    state = engine.scheduler.pause_state
    require(state == PauseState.PAUSED_ALL, subject, f"pause_state is {state!r} after a pause", "keep what is set")
    computed = engine.step()
    require(computed == 0, subject, f"a paused scheduler plans {computed} tokens", "plan nothing while PAUSED_ALL")
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    engine.check_answer("r0", prompt, params)
    engine.check_idle()
