"""Which tokens of which requests a step has, and which prompts are refused: each rule by itself."""

from __future__ import annotations

import pytest
from engine_fakes import engine, expected_output, make_request

from hardpoint.engine_core.request import Request
from hardpoint.engine_core.scheduler.admission import why_impossible
from hardpoint.types.pooling_params import PoolingParams

# Batching.


def test_a_long_prompt_is_spread_over_steps_while_others_decode():
    core = engine(max_num_batched_tokens=8)
    core.add(make_request("short", [1, 2], max_tokens=8, ignore_eos=True))
    core.step()
    core.add(make_request("long", list(range(20)), max_tokens=2, ignore_eos=True))
    steps = [core.step().num_scheduled_tokens for _ in range(4)]
    assert steps == [{"short": 1, "long": 7}, {"short": 1, "long": 7}, {"short": 1, "long": 6}, {"short": 1, "long": 1}]
    core.run()
    assert core.tokens("short") == expected_output([1, 2], make_request("r", [1], ignore_eos=True).sampling_params, 64)


def test_long_prefill_token_threshold_bounds_each_prompt():
    core = engine(max_num_batched_tokens=32, long_prefill_token_threshold=4)
    core.add(make_request("a", list(range(10))))
    core.add(make_request("b", list(range(10, 20))))
    assert core.step().num_scheduled_tokens == {"a": 4, "b": 4}


def test_an_adaptive_threshold_gives_a_prompt_its_even_share():
    core = engine(max_num_batched_tokens=32, long_prefill_token_threshold=4, long_prefill_token_threshold_adaptive=True)
    core.add(make_request("a", list(range(50))))
    assert core.step().num_scheduled_tokens == {"a": 32}
    core.add(make_request("b", list(range(100, 150))))
    assert core.step().num_scheduled_tokens == {"a": 18, "b": 14}
    assert core.step().num_scheduled_tokens == {"a": 1, "b": 16}


def test_the_scheduler_keeps_to_its_part_of_a_step_and_to_the_active_requests():
    core = engine(max_num_batched_tokens=32, max_num_scheduled_tokens=10, max_num_active_seqs=2)
    for name in "abc":
        core.add(make_request(name, [ord(name)] * 4))
    assert core.step().num_scheduled_tokens == {"a": 4, "b": 4}
    core.add(make_request("d", [7] * 20))
    assert core.step().num_scheduled_tokens == {"a": 1, "b": 1}


def test_a_short_prompt_is_admitted_beside_a_long_one():
    core = engine(max_num_batched_tokens=16, long_prefill_token_threshold=8)
    core.add(make_request("long", list(range(40))))
    core.step()
    core.add(make_request("short", [1, 2, 3]))
    assert core.step().num_scheduled_tokens == {"long": 8, "short": 3}


def test_without_chunked_prefill_a_prompt_waits_for_a_whole_budget():
    core = engine(max_num_batched_tokens=64, enable_chunked_prefill=False)
    core.add(make_request("a", list(range(40)), max_tokens=3, ignore_eos=True))
    core.add(make_request("b", list(range(40)), max_tokens=3, ignore_eos=True, skip_reading_prefix_cache=True))
    assert core.step().num_scheduled_tokens == {"a": 40}
    assert core.step().num_scheduled_tokens == {"a": 1, "b": 40}


def test_no_more_than_max_num_seqs_run():
    core = engine(max_num_seqs=2)
    for name in "abc":
        core.add(make_request(name, [1], max_tokens=2, ignore_eos=True))
    assert set(core.step().num_scheduled_tokens) == {"a", "b"}
    assert set(core.step().num_scheduled_tokens) == {"a", "b"}
    assert set(core.step().num_scheduled_tokens) == {"c"}


def test_fcfs_admits_in_order_and_never_past_a_request_that_waits():
    core = engine(num_blocks=11, max_model_len=40)  # 10 usable blocks of 4
    core.add(make_request("big", list(range(24)), max_tokens=4, ignore_eos=True))
    core.add(make_request("big2", list(range(30, 54 - 2)), max_tokens=4, ignore_eos=True))
    core.add(make_request("small", [1], max_tokens=4, ignore_eos=True))
    assert list(core.step().num_scheduled_tokens) == ["big"]
    assert core.scheduler.get_request_counts() == (1, 2)
    core.run()
    finished = [plan.finished_req_ids for plan in core.plans if plan.finished_req_ids]
    assert finished[0] == {"big"}


def test_priority_admits_the_lowest_number_first():
    core = engine(policy="priority", max_num_seqs=1)
    for name, priority in (("c", 2), ("a", 0), ("b", 1)):
        core.add(make_request(name, [1], priority=priority, max_tokens=1, ignore_eos=True))
    order = [next(iter(core.step().num_scheduled_tokens)) for _ in range(3)]
    assert order == ["a", "b", "c"]


# Refusal.


@pytest.mark.parametrize(
    ("length", "config", "text"),
    [
        (0, {}, "no token"),
        (64, {}, "64 tokens, which leaves no room below the context length of 64"),
        (80, {}, "80 tokens, which leaves no room below the context length of 64"),
        (20, {"num_blocks": 5}, "the whole KV cache holds only 16. Give it more memory"),
    ],
)
def test_a_prompt_that_never_fits_is_refused_with_a_reason(length, config, text):
    core = engine(**config)
    refusal = core.scheduler.why_impossible(Request("r", [1] * length, make_request("r", [1]).sampling_params, None))
    assert refusal is not None
    assert text in refusal


def test_limits_of_a_prompt_are_exact():
    def refusal(length: int, unchunked: int | None = None, pooling: bool = False) -> str | None:
        params = make_request("r", [1]).sampling_params
        request = Request("r", [1] * length, None if pooling else params, PoolingParams() if pooling else None)
        return why_impossible(request, model_max_len=64, cache_max_len=48, unchunked=unchunked)

    assert refusal(47) is None
    assert "KV cache holds only 48" in refusal(48)
    assert refusal(48, pooling=True) is None
    assert "KV cache holds only 48" in refusal(49, pooling=True)
    assert refusal(20, unchunked=20) is None
    assert "a step takes at most 20 and chunked prefill is off" in refusal(21, unchunked=20)


def test_the_longest_prompt_that_fits_runs():
    core = engine(num_blocks=5)
    core.add(make_request("a", list(range(15)), max_tokens=9))
    core.run()
    assert len(core.tokens("a")) == 1
