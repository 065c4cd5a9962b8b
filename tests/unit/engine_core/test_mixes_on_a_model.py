"""Random mixes on a tiny model: batching, chunks, preemption and cached prefixes change no token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hardpoint.config.engine_args import EngineArgs
from hardpoint.contracts.executor import Executor
from hardpoint.engine_core.scheduler.queues import create_request_queue
from hardpoint.engine_core.step import EngineCore
from hardpoint.types.messages import EngineCoreOutput, EngineCoreRequest
from hardpoint.types.sampling_params import SamplingParams

MAX_LEN = 128
BLOCK = 16
# Positions where the two best tokens are closer than this may go either way.
MARGIN = 1e-3


class Wanted(NamedTuple):
    """One request of a mix."""

    length: int
    branch: int
    max_tokens: int
    arrival_step: int
    priority: int
    seed: int | None
    penalty: float

    @property
    def prompt(self) -> list[int]:
        """Prompts of all branches agree in their first 20 tokens."""
        return [
            20 + position if position < 20 else 60 + position + 100 * self.branch for position in range(self.length)
        ]

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=0.0 if self.seed is None else 1.0,
            seed=self.seed,
            top_p=0.9,
            repetition_penalty=self.penalty,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            logprobs=2,
        )


mixes = st.lists(
    st.builds(
        Wanted,
        length=st.integers(1, 100),
        branch=st.integers(0, 2),
        max_tokens=st.integers(1, 24),
        arrival_step=st.integers(0, 10),
        priority=st.integers(-1, 1),
        seed=st.sampled_from([None, None, 7, 8]),
        penalty=st.sampled_from([1.0, 1.0, 1.3]),
    ),
    min_size=2,
    max_size=8,
)
limits = st.fixed_dictionaries(
    {
        "max_num_scheduled_tokens": st.sampled_from([9, 17, 40, 256]),
        "max_num_running_reqs": st.integers(1, 8),
        "policy": st.sampled_from(["fcfs", "priority"]),
    }
)


@pytest.fixture(scope="module")
def core(tiny_llama):
    config = EngineArgs(
        model=str(tiny_llama), dtype="float32", max_model_len=MAX_LEN, block_size=BLOCK, max_num_batched_tokens=256,
        max_num_seqs=8, num_gpu_blocks_override=1 + 8 * MAX_LEN // BLOCK,
    ).create_engine_config()  # fmt: skip
    core = EngineCore(config, Executor.get_class(config), False)
    yield core
    core.shutdown()


def request_of(name: str, wanted: Wanted) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name, prompt_token_ids=wanted.prompt, mm_features=None, sampling_params=wanted.params,
        pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
        priority=wanted.priority,
    )  # fmt: skip


def run(core: EngineCore, mix: list[Wanted]) -> list[list[EngineCoreOutput]]:
    """Run a mix to its end; return the outputs of each request, in the order of the mix."""
    outputs: dict[str, list[EngineCoreOutput]] = {}
    coming = sorted(enumerate(mix), key=lambda item: item[1].arrival_step)
    steps = 0
    while coming or core.has_work():
        while coming and coming[0][1].arrival_step <= steps:
            number, wanted = coming.pop(0)
            core.add_request(request_of(f"r{number}", wanted))
        for batch in core.step()[0].values():
            for output in batch.outputs:
                outputs.setdefault(output.request_id, []).append(output)
        steps += 1
        assert steps < 3000, "the engine makes no progress"
    return [outputs[f"r{number}"] for number in range(len(mix))]


@contextmanager
def squeezed(core: EngineCore, free_blocks: int, limits: dict) -> Iterator[None]:
    """Give a mix its limits, an empty prefix cache and only some of the blocks."""
    scheduler = core.scheduler
    for name, value in limits.items():
        setattr(scheduler, name, value)
    scheduler.waiting = create_request_queue(limits["policy"])
    assert core.reset_prefix_cache()
    pool = scheduler.kv_cache_manager.block_pool
    held = pool.get_new_blocks(pool.get_num_free_blocks() - free_blocks)
    try:
        yield
    finally:
        core.abort_requests(list(scheduler.requests))
        pool.free_blocks(held)


def tokens_of(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


@pytest.fixture(scope="module")
def alone(core):
    """wanted -> (its tokens alone, how many of them are sure: before the first that is nearly a tie)."""

    @cache
    def generate(wanted: Wanted) -> tuple[list[int], int]:
        with squeezed(core, 60, {"max_num_scheduled_tokens": 256, "max_num_running_reqs": 8, "policy": "fcfs"}):
            (outputs,) = run(core, [wanted])
        # Columns 1 and 2 are the two best.
        margins = [float(row[1] - row[2]) for output in outputs for row in output.new_logprobs.logprobs]
        tokens = tokens_of(outputs)
        return tokens, next((i for i, margin in enumerate(margins) if margin < MARGIN), len(tokens))

    return generate


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mix=mixes, limits=limits, spare_blocks=st.sampled_from([0, 0, 2, 6, 40]))
def test_a_mix_gives_the_tokens_of_each_request_alone(core, alone, mix, limits, spare_blocks):
    expected = [alone(wanted._replace(arrival_step=0, priority=0)) for wanted in mix]
    with squeezed(core, MAX_LEN // BLOCK + spare_blocks, limits):
        outputs = run(core, mix)
    for given_outputs, (tokens, num_sure) in zip(outputs, expected, strict=True):
        assert tokens_of(given_outputs)[:num_sure] == tokens[:num_sure]
        assert len(tokens_of(given_outputs)) == len(tokens)
