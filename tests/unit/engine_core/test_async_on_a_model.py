"""Async scheduling on a tiny model: every request gets, the tokens that the engine that waits gives it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hardpoint.config.engine_args import EngineArgs
from hardpoint.contracts.executor import Executor
from hardpoint.contracts.logits_processor import AdapterLogitsProcessor
from hardpoint.engine_core.scheduler.async_scheduler import AsyncScheduler
from hardpoint.engine_core.step import EngineCore
from hardpoint.types.finish import FinishReason
from hardpoint.types.messages import EngineCoreRequest
from hardpoint.types.sampling_params import SamplingParams, StructuredOutputsParams

MAX_LEN, BLOCK = 128, 16
PROMPTS = [[20 + position % 7 for position in range(length)] for length in (3, 20, 33, 48, 90)]
REGEX = "[ab]{3,9}"


class Evens(AdapterLogitsProcessor):
    """After an odd number of tokens only even ids, where asked for: it reads what was generated so far."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        if not (params.extra_args or {}).get("evens"):
            return None

        def apply(output_ids, logits):
            if len(output_ids) % 2:
                logits[1::2] = float("-inf")
            return logits

        return apply


class Wanted(NamedTuple):
    """One request of a mix."""

    prompt: int
    max_tokens: int
    arrival_step: int
    kind: str
    priority: int
    aborted_after: int | None

    def params(self) -> SamplingParams:
        more: dict[str, Any] = {
            "greedy": {"temperature": 0.0},
            "seeded": {"temperature": 1.0, "seed": self.prompt, "top_p": 0.9, "top_k": 50},
            "penalised": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
            "logprobs": {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
            "stopping": {"temperature": 1.0, "seed": 3, "stop_token_ids": list(range(0, 400, 3)), "min_tokens": 1},
            "processed": {"temperature": 0.0, "extra_args": {"evens": True}},
            "bound": {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(regex=REGEX)},
            "biased": {"temperature": 0.0, "logit_bias": {7: 5.0, 11: 5.0}, "allowed_token_ids": [7, 11, 30]},
        }[self.kind]
        params = SamplingParams(max_tokens=self.max_tokens, ignore_eos=self.kind != "bound", **more)
        if self.kind == "bound":
            params.update_from_generation_config({}, eos_token_id=EOS)
            params.structured_outputs._backend = "xgrammar"
        return params


EOS = 2
KINDS = ["greedy", "seeded", "penalised", "logprobs", "stopping", "processed", "biased"]


def mixes_of(kinds: list[str]) -> Any:
    wanted = st.builds(
        Wanted,
        prompt=st.integers(0, len(PROMPTS) - 1),
        max_tokens=st.integers(1, 20),
        arrival_step=st.integers(0, 8),
        kind=st.sampled_from(kinds),
        priority=st.integers(-1, 1),
        aborted_after=st.sampled_from([None, None, None, 1, 4]),
    )
    return st.lists(wanted, min_size=1, max_size=8)


def make(model: Any, async_scheduling: bool, **more: Any) -> EngineCore:
    config = EngineArgs(
        model=str(model), dtype="float32", max_model_len=MAX_LEN, block_size=BLOCK, max_num_batched_tokens=64,
        max_num_seqs=4, num_gpu_blocks_override=1 + MAX_LEN // BLOCK + 5, logits_processors=[Evens],
        async_scheduling=async_scheduling, scheduling_policy="priority", **more,
    ).create_engine_config()  # fmt: skip
    return EngineCore(config, Executor.get_class(config), False)


@pytest.fixture(scope="module")
def engines(tiny_llama):
    """(the one that waits, the one that plans ahead), with blocks for little more than one long request."""
    both = make(tiny_llama, False), make(tiny_llama, True)
    yield both
    for core in both:
        core.shutdown()


def run(core: EngineCore, mix: list[Wanted]) -> list[tuple]:
    """Run a mix; return tokens, log-probabilities and the end of each request (tokens alone where it was aborted)."""
    core.abort_requests([f"r{number}" for number in range(len(mix) + 8)])
    while core.has_work():
        core.step()
    assert core.reset_prefix_cache()
    found: dict[str, list] = {f"r{number}": [] for number in range(len(mix))}
    coming = sorted(enumerate(mix), key=lambda item: item[1].arrival_step)
    steps = 0
    while coming or core.has_work():
        while coming and coming[0][1].arrival_step <= steps:
            number, wanted = coming.pop(0)
            core.add_request(
                EngineCoreRequest(
                    request_id=f"r{number}", prompt_token_ids=PROMPTS[wanted.prompt], mm_features=None,
                    sampling_params=wanted.params(), pooling_params=None, arrival_time=0.0, lora_request=None,
                    cache_salt=None, data_parallel_rank=None, priority=wanted.priority,
                )
            )  # fmt: skip
        for batch in core.step()[0].values():
            for output in batch.outputs:
                assert output.error is None, output.error
                found[output.request_id].append(output)
        done = {name: sum(len(output.new_token_ids) for output in outputs) for name, outputs in found.items()}
        leaving = [
            wanted.aborted_after is not None and done[f"r{n}"] >= wanted.aborted_after for n, wanted in enumerate(mix)
        ]
        core.abort_requests([f"r{number}" for number, leaves in enumerate(leaving) if leaves])
        steps += 1
        assert steps < 3000, "the engine makes no progress"
    return [summary(wanted, found[f"r{number}"]) for number, wanted in enumerate(mix)]


def summary(wanted: Wanted, outputs: list) -> tuple:
    tokens = [token for output in outputs for token in output.new_token_ids]
    if wanted.aborted_after is not None:
        return (tokens[: wanted.aborted_after],)
    parts = [
        lists for output in outputs for lists in (output.new_logprobs, output.new_prompt_logprobs_tensors) if lists
    ]
    numbers = [float(value) for lists in parts for row in lists.logprobs for value in row]
    return tokens, numbers, outputs[-1].finish_reason, outputs[-1].stop_reason


def check(engines: tuple[EngineCore, EngineCore], mix: list[Wanted]) -> None:
    waiting, ahead = (run(core, mix) for core in engines)
    for expected, answer in zip(waiting, ahead, strict=True):
        assert answer[:1] + answer[2:] == expected[:1] + expected[2:]
        if len(expected) > 1:
            # Batches of another make differ in the last bits.
            assert answer[1] == pytest.approx(expected[1], abs=1e-4)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mix=mixes_of(KINDS))
def test_a_mix_is_answered_as_by_the_engine_that_waits(engines, mix):
    check(engines, mix)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mix=mixes_of([*KINDS, "bound", "bound"]))
def test_and_with_rows_that_wait_for_their_grammar(engines, mix):
    check(engines, mix)


def test_the_engines_are_what_their_names_say(engines):
    waiting, ahead = engines
    assert not isinstance(waiting.scheduler, AsyncScheduler)
    assert isinstance(ahead.scheduler, AsyncScheduler)
    mix = [Wanted(4, 20, 0, "greedy", 0, None), Wanted(4, 20, 0, "seeded", 1, None)]
    assert [answer[2] for answer in run(ahead, mix)] == [FinishReason.LENGTH] * 2
