"""Over random mixes of requests, budgets and cache sizes: the engine gives what each request gives alone."""

from __future__ import annotations

from engine_fakes import Engine, expected_output, make_config, make_request, make_scheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.engine_core.scheduler.async_scheduler import AsyncScheduler
from hardpoint.engine_core.scheduler.default import Scheduler
from hardpoint.types.finish import FinishReason


def prompt_of(length: int, branch: int, fork: int) -> list[int]:
    """Prompts of one branch are prefixes of each other; branches agree in their first `fork` tokens."""
    return [position % 11 if position < fork else position % 5 + branch for position in range(length)]


prompts = st.builds(prompt_of, st.integers(1, 60), st.integers(0, 2), st.sampled_from([0, 16, 33]))
requests = st.lists(
    st.tuples(
        prompts,
        st.integers(1, 40),  # max_tokens
        st.sampled_from([None, None, "a", "b"]),  # salt
        st.integers(-1, 1),  # priority
        st.integers(0, 12),  # step of arrival
        st.integers(0, 6),  # min_tokens
    ),
    min_size=1,
    max_size=12,
)
engines = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 4, 16]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(6, 48),
        "long_prefill_token_threshold": st.sampled_from([0, 3, 8]),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "scheduler_reserve_full_isl": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.1, 0.5]),
        "prefix_caching": st.booleans(),
    }
)
MAX_LEN = 64


# A scheduler, and how many steps are planned before the result of the first is in: with `Scheduler` as with
# pipeline stages, where a request's next token is planned once the last is known.
manners = st.sampled_from([(Scheduler, 1), (Scheduler, 2), (Scheduler, 3), (AsyncScheduler, 1), (AsyncScheduler, 2)])
SYNC = (Scheduler, 1)


def run_mix(mix: list, engine: dict, spare_tokens: int, window: int = 0, manner: tuple = SYNC) -> Engine:
    """Run a mix in a cache that holds one longest request and `spare_tokens` more."""
    config = make_config(max_model_len=MAX_LEN, **engine)
    num_blocks = 1 + -(-(MAX_LEN + spare_tokens) // engine["block_size"])
    kind, in_flight = manner
    core = Engine(make_scheduler(config, num_blocks, window=window, kind=kind), window=window, in_flight=in_flight)
    arrivals = sorted(enumerate(mix), key=lambda item: item[1][4])
    while arrivals or core.has_work:
        while arrivals and arrivals[0][1][4] <= len(core.plans):
            number, (prompt, max_tokens, salt, priority, _, min_tokens) = arrivals.pop(0)
            core.add(
                make_request(
                    f"r{number}", prompt, salt=salt, priority=priority, max_tokens=max_tokens,
                    min_tokens=min(min_tokens, max_tokens),
                )
            )  # fmt: skip
        core.step()
        assert len(core.plans) < 2000, "the engine makes no progress"
    return core


def check_outputs(core: Engine, mix: list, window: int = 0) -> None:
    for number, (prompt, max_tokens, salt, _, _, min_tokens) in enumerate(mix):
        request_id = f"r{number}"
        params = make_request(
            request_id, prompt, max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens)
        ).sampling_params
        expected = expected_output(prompt, params, MAX_LEN, salt, window)
        assert core.tokens(request_id) == expected
        assert [output.finish_reason for output in core.outputs[request_id][:-1]].count(None) == len(
            core.outputs[request_id]
        ) - 1
        assert core.last(request_id).finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


def check_all_returned(core: Engine) -> None:
    core.check_blocks()
    pool = core.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_usable_blocks
    assert core.scheduler.kv_cache_manager.reset_prefix_cache()
    assert core.runner.tokens == {}


@settings(max_examples=250, deadline=None)
@given(mix=requests, engine=engines, spare_tokens=st.sampled_from([0, 0, 8, 30, 100, 1000]), manner=manners)
def test_every_request_gives_what_it_gives_alone(mix, engine, spare_tokens, manner):
    core = run_mix(mix, engine, spare_tokens, manner=manner)
    check_outputs(core, mix)
    check_all_returned(core)


@settings(max_examples=80, deadline=None)
@given(
    mix=requests, engine=engines, spare_tokens=st.sampled_from([0, 8, 30]), window=st.integers(1, 20), manner=manners
)  # fmt: skip
def test_the_same_with_a_sliding_window(mix, engine, spare_tokens, window, manner):
    core = run_mix(mix, engine, spare_tokens, window, manner)
    check_outputs(core, mix, window)
    check_all_returned(core)


@settings(max_examples=100, deadline=None)
@given(
    mix=requests, engine=engines, spare_tokens=st.sampled_from([0, 30]), manner=manners,
    aborts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 15)), max_size=5),
    resets=st.lists(st.integers(0, 15), max_size=2),
)  # fmt: skip
def test_aborts_and_cache_resets_hurt_nobody_else(mix, engine, spare_tokens, manner, aborts, resets):
    config = make_config(max_model_len=MAX_LEN, **engine)
    num_blocks = 1 + -(-(MAX_LEN + spare_tokens) // engine["block_size"])
    kind, in_flight = manner
    core = Engine(make_scheduler(config, num_blocks, kind=kind), in_flight=in_flight)
    for number, (prompt, max_tokens, salt, priority, _, _) in enumerate(mix):
        core.add(make_request(f"r{number}", prompt, salt=salt, priority=priority, max_tokens=max_tokens))
    aborted, steps = set(), 0
    while core.has_work:
        for number, step in aborts:
            if step == steps:
                ended = core.scheduler.finish_requests([f"r{number}", "unknown"], 9)
                aborted |= {request.request_id for request in ended}
        if steps in resets:
            assert core.scheduler.reset_prefix_cache(reset_running_requests=True)
        core.step()
        steps += 1
        assert len(core.plans) < 2000, "the engine makes no progress"
    for number, (prompt, max_tokens, salt, *_) in enumerate(mix):
        if f"r{number}" in aborted:
            continue
        params = make_request("r", prompt, max_tokens=max_tokens).sampling_params
        assert core.tokens(f"r{number}") == expected_output(prompt, params, MAX_LEN, salt)
    check_all_returned(core)
