"""Which blocks a request gets, shares and gives back: each rule by itself."""

from __future__ import annotations

import pytest
from engine_fakes import engine, expected_output, make_request, prefix_hits

from hardpoint.types.finish import FinishReason

# Prefix cache.


def test_equal_prefixes_share_blocks_and_salts_do_not():
    core = engine()
    prompt = list(range(12))
    for name, salt in (("first", None), ("same", None), ("salted", "x"), ("salted2", "x")):
        core.add(make_request(name, [*prompt, 50], salt=salt, max_tokens=2))
        core.run()
    core.add(make_request("whole", prompt, max_tokens=2))
    core.run()
    # A whole prompt in the cache still leaves its last block to compute: there would be no logits.
    assert prefix_hits(core) == {"first": 0, "same": 12, "salted": 0, "salted2": 12, "whole": 8}


def test_equal_prompts_of_one_step_are_computed_once():
    core = engine()
    for name in ("a", "b", "c"):
        core.add(make_request(name, list(range(13)), max_tokens=2))
    assert core.step().num_scheduled_tokens == {"a": 13, "b": 1, "c": 1}
    core.run()


@pytest.mark.parametrize("params", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 1}])
def test_a_request_may_refuse_cached_blocks(params):
    core = engine()
    for name in ("a", "b"):
        core.add(make_request(name, list(range(12)), max_tokens=1, **params))
        core.run()
    assert prefix_hits(core) == {"a": 0, "b": 0}


def test_prefix_caching_can_be_off():
    core = engine(prefix_caching=False)
    for name in ("a", "b"):
        core.add(make_request(name, list(range(12)), max_tokens=1))
        core.run()
    assert prefix_hits(core) == {"a": 0, "b": 0}


def test_least_recently_used_blocks_go_first():
    core = engine(num_blocks=9, max_model_len=32)  # 8 usable blocks of 4
    for name, start in (("a", 0), ("b", 20), ("a2", 0)):
        core.add(make_request(name, list(range(start, start + 12)), max_tokens=1))
        core.run()
    core.add(make_request("c", list(range(60, 76)), max_tokens=1))  # takes 4 blocks: those of b
    core.run()
    core.add(make_request("a3", [*range(12), 1], max_tokens=1))
    core.run()
    core.add(make_request("b2", [*range(20, 32), 1], max_tokens=1))
    core.run()
    hits = prefix_hits(core)
    assert hits["a3"] == 12
    assert hits["b2"] == 0


def test_reset_prefix_cache_refuses_while_blocks_are_in_use():
    core = engine()
    core.add(make_request("a", list(range(12)), max_tokens=8, ignore_eos=True))
    core.step()
    assert not core.scheduler.reset_prefix_cache()
    assert core.scheduler.reset_prefix_cache(reset_running_requests=True)
    plan = core.step()
    assert plan.preempted_req_ids == {"a"}
    assert plan.scheduled_cached_reqs.resumed_req_ids == {"a"}
    assert plan.num_scheduled_tokens == {"a": 13}
    core.run()
    assert not core.scheduler.reset_prefix_cache(reset_connector=True)


# Preemption.


def test_fcfs_preempts_the_request_admitted_last():
    core = engine(num_blocks=9, max_model_len=32, prefix_caching=False, max_num_seqs=3)
    for name in "abc":
        core.add(make_request(name, list(range(8)), max_tokens=20, ignore_eos=True))
    core.run()
    first = next(plan for plan in core.plans if plan.preempted_req_ids)
    assert first.preempted_req_ids == {"c"}
    assert core.outputs["c"][-1].finish_reason is FinishReason.LENGTH
    alone = expected_output(list(range(8)), make_request("r", [1], max_tokens=20, ignore_eos=True).sampling_params, 32)
    assert core.tokens("a") == core.tokens("b") == core.tokens("c") == alone


def test_priority_preempts_the_worst_rank_wherever_it_stands():
    core = engine(num_blocks=9, max_model_len=32, prefix_caching=False, policy="priority")
    core.add(make_request("worst", list(range(8)), priority=9, max_tokens=20, ignore_eos=True))
    core.step()
    for name in ("b", "c"):
        core.add(make_request(name, list(range(8)), priority=1, max_tokens=20, ignore_eos=True))
    core.run()
    assert next(plan.preempted_req_ids for plan in core.plans if plan.preempted_req_ids) == {"worst"}
    assert core.last("worst").finish_reason is FinishReason.LENGTH


def test_a_planned_victim_gives_its_tokens_back():
    core = engine(
        num_blocks=11, max_model_len=40, max_num_batched_tokens=12, max_num_seqs=4, prefix_caching=False,
        policy="priority", scheduler_reserve_full_isl=False,
    )  # fmt: skip
    core.add(make_request("victim", list(range(11)), priority=5, max_tokens=30, ignore_eos=True))
    core.step()
    core.add(make_request("best", list(range(11)), priority=0, max_tokens=30, ignore_eos=True))
    core.step()
    core.add(make_request("long", list(range(36)), priority=1, max_tokens=1))
    assert core.step().num_scheduled_tokens == {"victim": 1, "best": 1, "long": 10}
    # All 10 blocks are taken, and the best one needs another: the victim was planned just before.
    plan = core.step()
    assert plan.preempted_req_ids == {"victim"}
    assert plan.num_scheduled_tokens == {"best": 1, "long": 11}
    core.run()


def test_nobody_is_admitted_in_a_step_that_preempts():
    core = engine(num_blocks=9, max_model_len=32, prefix_caching=False, max_num_seqs=2, policy="priority")
    for name, priority in (("a", 0), ("b", 2)):
        core.add(make_request(name, list(range(12)), priority=priority, max_tokens=20, ignore_eos=True))
    core.step()
    core.add(make_request("small", [1], priority=1, max_tokens=1))
    preempting = next(plan for plan in (core.step() for _ in range(20)) if plan.preempted_req_ids)
    assert set(preempting.num_scheduled_tokens) == {"a"}
    assert set(core.step().num_scheduled_tokens) == {"a", "small"}


def test_a_preempted_request_comes_before_those_that_arrived_later():
    core = engine(num_blocks=9, max_model_len=32, prefix_caching=False, max_num_seqs=2)
    for name in "ab":
        core.add(make_request(name, list(range(12)), max_tokens=20, ignore_eos=True))
    core.add(make_request("small", [1], max_tokens=1))
    preempting = next(plan for plan in (core.step() for _ in range(20)) if plan.preempted_req_ids)
    assert preempting.preempted_req_ids == {"b"}
    core.run()
    later = core.plans[core.plans.index(preempting) + 1 :]
    assert next(name for plan in later for name in plan.num_scheduled_tokens if name != "a") == "b"


def test_the_watermark_keeps_blocks_free_on_admission():
    def admitted(watermark: float) -> set[str]:
        core = engine(num_blocks=11, max_model_len=40, watermark=watermark, prefix_caching=False)
        for name in "abc":
            core.add(make_request(name, list(range(12)), max_tokens=1))
        return set(core.step().num_scheduled_tokens)

    assert admitted(0.0) == {"a", "b", "c"}
    assert admitted(0.3) == {"a", "b"}
    # Alone it is admitted whatever the watermark says: nothing else will free blocks.
    assert admitted(0.9) == {"a"}


def test_only_prompts_that_fit_whole_are_admitted_unless_told_otherwise():
    def admitted(reserve: bool) -> set[str]:
        core = engine(
            num_blocks=11, max_model_len=40, max_num_batched_tokens=28, prefix_caching=False,
            scheduler_reserve_full_isl=reserve,
        )  # fmt: skip
        core.add(make_request("a", list(range(24)), max_tokens=1))
        core.add(make_request("b", list(range(20)), max_tokens=1))
        return set(core.step().num_scheduled_tokens)

    assert admitted(True) == {"a"}
    assert admitted(False) == {"a", "b"}


def test_a_cache_smaller_than_max_model_len_ends_an_output_early():
    core = engine(num_blocks=5, max_model_len=64)  # 16 tokens in all
    assert core.scheduler.max_model_len == 16
    core.add(make_request("a", list(range(10)), max_tokens=30, ignore_eos=True))
    core.run()
    assert len(core.tokens("a")) == 6
    assert core.last("a").finish_reason is FinishReason.LENGTH


# Several steps in flight.


def test_a_request_preempted_while_a_step_computes_it_waits_for_its_token():
    core = engine()
    request = make_request("a", [1, 2, 3], ignore_eos=True)
    core.add(request)
    core.plan()
    assert core.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert core.plan().num_scheduled_tokens == {}
    core.take_in()
    core.take_in()
    assert core.plan().num_scheduled_tokens == {"a": 4}
    core.run()
    assert core.tokens("a") == expected_output([1, 2, 3], request.sampling_params, 64)


def test_a_preempted_request_whose_token_in_flight_is_its_last_ends_while_it_waits():
    core = engine()
    core.add(make_request("a", [1, 2, 3], max_tokens=1))
    core.plan()
    assert core.scheduler.reset_prefix_cache(reset_running_requests=True)
    core.take_in()
    assert core.last("a").finish_reason is FinishReason.LENGTH
    assert core.scheduler.get_request_counts() == (0, 0)
    core.run()
    core.check_blocks()


def test_nobody_finds_a_block_that_a_preempted_request_was_only_planned_to_write():
    core = engine(
        num_blocks=5, max_model_len=16, max_num_batched_tokens=16, long_prefill_token_threshold=3, policy="priority"
    )
    worse, better = list(range(12)), list(range(50, 56))
    core.add(make_request("worse", worse, max_tokens=2, priority=1, ignore_eos=True))
    core.step()
    core.add(make_request("better", better, max_tokens=2, ignore_eos=True))
    core.step()
    # "worse" is planned into its third block, fills the second, and loses both to "better" in the same plan.
    assert core.step().num_scheduled_tokens == {"better": 3}
    core.run()
    params = make_request("r", [1], max_tokens=2, ignore_eos=True).sampling_params
    assert core.tokens("worse") == expected_output(worse, params, 16)
    assert core.tokens("better") == expected_output(better, params, 16)
