"""What one scheduler decision does, each rule by itself."""

from __future__ import annotations

import numpy as np
import pytest
from engine_fakes import EOS, Engine, expected_output, make_config, make_request, make_scheduler

from hardpoint.contracts.scheduler import PauseState
from hardpoint.engine_core.request import Request
from hardpoint.engine_core.scheduler.admission import why_impossible
from hardpoint.engine_core.scheduler.stopping import check_stop, repeats_at_end
from hardpoint.types.finish import FinishReason, RequestStatus
from hardpoint.types.logprobs import LogprobsLists
from hardpoint.types.messages import EngineCoreEventType
from hardpoint.types.pooling_params import PoolingParams
from hardpoint.types.sampling_params import RepetitionDetectionParams
from hardpoint.types.schedule import NO_TOKEN_LEFT, ModelRunnerOutput


def engine(num_blocks: int = 100, *, log_stats: bool = False, **config) -> Engine:
    return Engine(make_scheduler(make_config(**config), num_blocks, log_stats=log_stats))


def answer(plan, tokens: dict[str, list[int]] | None = None, **parts) -> ModelRunnerOutput:
    ids = list(plan.num_scheduled_tokens)
    sampled = [(tokens or {}).get(request_id, [1]) for request_id in ids]
    return ModelRunnerOutput(ids, {request_id: row for row, request_id in enumerate(ids)}, sampled, **parts)


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


# Prefix cache.


def prefix_hits(core: Engine) -> dict[str, int]:
    return {new.req_id: new.num_computed_tokens for plan in core.plans for new in plan.scheduled_new_reqs}


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


# Ends of outputs.


def request_with_output(output: list[int], **params) -> Request:
    request = Request.from_engine_core_request(make_request("r", [1, 2, 3], **params), None)
    request.append_output_token_ids(output)
    return request


@pytest.mark.parametrize(
    ("output", "params", "status", "stop_reason"),
    [
        ([EOS], {}, "FINISHED_STOPPED", None),
        ([EOS], {"ignore_eos": True}, None, None),
        ([5, 9], {"stop_token_ids": [9]}, "FINISHED_STOPPED", 9),
        ([5, 9], {"stop_token_ids": [9], "ignore_eos": True}, "FINISHED_STOPPED", 9),
        ([EOS], {"stop_token_ids": [EOS]}, "FINISHED_STOPPED", None),
        # With min_tokens N the first end token that counts is token N + 1.
        ([5, EOS], {"min_tokens": 2}, None, None),
        ([5, 5, EOS], {"min_tokens": 2}, "FINISHED_STOPPED", None),
        ([5, 9], {"min_tokens": 2, "stop_token_ids": [9]}, None, None),
        ([5, 5, 9], {"min_tokens": 2, "stop_token_ids": [9]}, "FINISHED_STOPPED", 9),
        ([5] * 8, {"max_tokens": 8}, "FINISHED_LENGTH_CAPPED", None),
        ([5] * 8, {"max_tokens": 8, "min_tokens": 8}, "FINISHED_LENGTH_CAPPED", None),
        ([5] * 7 + [EOS], {"max_tokens": 8}, "FINISHED_STOPPED", None),
        ([5] * 7, {"max_tokens": 8}, None, None),
        ([5] * 60, {"max_tokens": None}, None, None),
        ([5] * 61, {"max_tokens": None}, "FINISHED_LENGTH_CAPPED", None),
        ([5] * 61, {"max_tokens": 100, "min_tokens": 100}, "FINISHED_LENGTH_CAPPED", None),
    ],
)
def test_when_an_output_ends(output, params, status, stop_reason):
    request = request_with_output(output, **params)
    assert check_stop(request, max_model_len=64) == (status is not None)
    assert request.status == (RequestStatus[status] if status else RequestStatus.WAITING)
    assert request.stop_reason == stop_reason


@pytest.mark.parametrize(
    ("output", "rule", "ends"),
    [
        ([1, 2, 3, 1, 2, 3], (4, 1, 2), True),
        ([9, 1, 2, 3, 1, 2, 3], (3, 3, 2), True),
        ([1, 2, 3, 1, 2, 3], (2, 1, 2), False),
        ([1, 2, 3, 1, 2, 3], (4, 1, 3), False),
        ([5, 5, 5], (1, 0, 3), True),
        ([5, 5, 5], (1, 0, 2), True),
        ([5, 6, 5], (2, 0, 2), False),
        ([5, 5, 5], (0, 0, 2), False),
    ],
)
def test_repetition_ends_an_output(output, rule, ends):
    largest, smallest, count = rule
    detection = RepetitionDetectionParams(max_pattern_size=largest, min_pattern_size=smallest, min_count=count)
    request = request_with_output(output, repetition_detection=detection, max_tokens=50)
    assert check_stop(request, max_model_len=64) == ends
    assert (request.get_finished_reason() is FinishReason.REPETITION) == ends
    assert repeats_at_end([1, 2, 1, 2], 2, 2)


def test_tokens_past_the_end_are_dropped():
    core = engine()
    core.add(make_request("a", [1], max_tokens=8))
    plan = core.scheduler.schedule()
    outputs = core.scheduler.update_from_output(plan, answer(plan, {"a": [5, EOS, 5, 5]}))
    assert outputs[0].outputs[0].new_token_ids == [5, EOS]
    assert outputs[0].outputs[0].finish_reason is FinishReason.STOP
    assert not core.scheduler.has_unfinished_requests()


# Outputs.


@pytest.mark.parametrize(
    ("rules", "blamed"),
    [({"allowed_token_ids": [1]}, "allowed_token_ids"), ({"bad_words": ["x"]}, "bad_words"), ({}, None)],
)
def test_a_client_that_forbids_itself_every_token_is_to_blame(rules, blamed):
    core = engine()
    core.runner.fail["bad"] = NO_TOKEN_LEFT
    core.add(make_request("bad", [1, 2], **rules))
    core.run()
    assert core.last("bad").error == NO_TOKEN_LEFT
    assert core.last("bad").refused_parameter == blamed


def test_one_failing_request_ends_alone_and_leaves_nothing_to_find():
    core = engine()
    prompt = list(range(12))
    core.runner.fail["bad"] = "NaN in the logits"
    core.add(make_request("bad", prompt, salt="s", max_tokens=4))
    core.add(make_request("good", [3, 4], max_tokens=4, ignore_eos=True))
    core.run()
    assert core.last("bad").finish_reason is FinishReason.ERROR
    assert core.last("bad").error == "NaN in the logits"
    assert core.tokens("bad") == []
    assert len(core.tokens("good")) == 4
    core.runner.fail.clear()
    core.add(make_request("next", prompt, salt="s", max_tokens=1))
    core.run()
    assert prefix_hits(core)["next"] == 0
    core.check_blocks()


def test_each_request_gets_its_own_logprob_rows():
    core = engine()
    core.add(make_request("none", [1]))
    core.add(make_request("chunk", list(range(40)), logprobs=5))
    core.add(make_request("two", [2], logprobs=2))
    core.scheduler.max_num_scheduled_tokens = 32
    plan = core.scheduler.schedule()
    assert list(plan.num_scheduled_tokens) == ["none", "chunk"]
    core.scheduler.update_from_output(plan, answer(plan, {"none": [4], "chunk": []}))
    plan = core.scheduler.schedule()
    assert list(plan.num_scheduled_tokens) == ["none", "chunk", "two"]
    rows = LogprobsLists(
        np.arange(18, dtype=np.int32).reshape(3, 6), np.zeros((3, 6), np.float32), np.arange(3, dtype=np.int32)
    )
    sampled = {"none": [4], "chunk": [6], "two": [12]}
    outputs = core.scheduler.update_from_output(plan, answer(plan, sampled, logprobs=rows))[0].outputs
    by_id = {output.request_id: output.new_logprobs for output in outputs}
    assert by_id["none"] is None
    assert by_id["chunk"].logprob_token_ids.tolist() == [[6, 7, 8, 9, 10, 11]]
    assert by_id["two"].logprob_token_ids.tolist() == [[12, 13, 14]]
    assert by_id["two"].logprobs.shape == (1, 3)
    assert by_id["two"].sampled_token_ranks.tolist() == [2]


def test_prompt_logprobs_are_sent_once():
    core = engine()
    core.add(make_request("a", list(range(8)), prompt_logprobs=1, max_tokens=5, ignore_eos=True))
    rows = LogprobsLists(np.zeros((7, 2), np.int32), np.zeros((7, 2), np.float32), np.ones(7, np.int32))
    sent = []
    for step in range(3):
        if step == 2:
            core.scheduler.reset_prefix_cache(reset_running_requests=True)
        plan = core.scheduler.schedule()
        result = answer(plan, {"a": [1]}, prompt_logprobs_dict={"a": rows if step != 1 else None})
        sent += [o.new_prompt_logprobs_tensors for o in core.scheduler.update_from_output(plan, result)[0].outputs]
    assert sent == [rows, None, None]


def test_outputs_go_to_the_front_end_that_asked():
    core = engine()
    for name, client in (("a", 0), ("b", 3)):
        request = make_request(name, [1])
        request.client_index = client
        core.add(request)
    plan = core.scheduler.schedule()
    by_client = core.scheduler.update_from_output(plan, answer(plan))
    assert {client: [o.request_id for o in batch.outputs] for client, batch in by_client.items()} == {
        0: ["a"],
        3: ["b"],
    }


def test_finished_sets_are_reported_when_asked_for():
    scheduler = engine().scheduler
    scheduler.include_finished_set = True
    core = Engine(scheduler)
    core.add(make_request("a", [1], max_tokens=1))
    plan = scheduler.schedule()
    assert scheduler.update_from_output(plan, answer(plan))[0].finished_requests == {"a"}


def test_events_and_stats_tell_a_request_life():
    core = engine(num_blocks=9, max_model_len=32, log_stats=True)
    core.add(make_request("a", list(range(8)), max_tokens=20, ignore_eos=True))
    core.add(make_request("b", list(range(100, 108)), max_tokens=20, ignore_eos=True))
    core.add(make_request("c", list(range(8)), max_tokens=1))
    core.run()
    kinds = [event.type for output in core.outputs["b"] for event in output.events or ()]
    assert kinds[:2] == [EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED]
    assert EngineCoreEventType.PREEMPTED in kinds
    stamps = [event.timestamp for output in core.outputs["b"] for event in output.events or ()]
    assert stamps == sorted(stamps)
    prefill = core.outputs["c"][0].prefill_stats
    assert (prefill.num_prompt_tokens, prefill.num_cached_tokens, prefill.num_computed_tokens) == (8, 4, 4)
    assert all(output.prefill_stats is None for output in core.outputs["b"][1:])


def test_stats_are_a_snapshot_of_each_step():
    core = engine(num_blocks=11, log_stats=True, max_num_seqs=2)
    for name in "abc":
        core.add(make_request(name, list(range(8)), max_tokens=4, ignore_eos=True))
    plan = core.scheduler.schedule()
    stats = core.scheduler.update_from_output(plan, core.runner.execute(plan))[0].scheduler_stats
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (2, 1)
    assert stats.kv_cache_usage == pytest.approx(3 / 10)  # 2 blocks of a, and b's own beside the shared one
    assert (stats.prefix_cache_stats.requests, stats.prefix_cache_stats.queries, stats.prefix_cache_stats.hits) == (
        2,
        16,
        4,
    )
    assert core.scheduler.make_stats().prefix_cache_stats.requests == 0
    assert engine().scheduler.make_stats() is None


def test_block_residency_is_reported_where_asked_for():
    config = make_config(max_model_len=16)
    config.observability_config.kv_cache_metrics = True
    config.observability_config.kv_cache_metrics_sample = 1.0
    core = Engine(make_scheduler(config, 5, log_stats=True))
    events = []
    for number in range(3):
        core.add(make_request(f"r{number}", list(range(20 * number, 20 * number + 12)), max_tokens=1))
        while core.scheduler.has_requests():
            plan = core.scheduler.schedule()
            stats = core.scheduler.update_from_output(plan, core.runner.execute(plan))[0].scheduler_stats
            events += stats.kv_cache_eviction_events
    assert len(events) >= 3
    assert all(lifetime >= idle >= 0 for lifetime, idle, _ in events)


# Control.


def test_aborted_requests_leave_at_once():
    core = engine(max_num_seqs=1)
    for name in ("running", "waiting"):
        core.add(make_request(name, [1], max_tokens=8, ignore_eos=True))
    core.step()
    ended = core.scheduler.finish_requests(["waiting", "running", "unknown", "running"], RequestStatus.FINISHED_ABORTED)
    assert {request.request_id for request in ended} == {"running", "waiting"}
    assert core.scheduler.get_request_counts() == (0, 0)
    assert core.scheduler.has_requests()
    assert core.step().finished_req_ids == {"running", "waiting"}
    assert not core.scheduler.has_requests()
    core.check_blocks()


def test_pausing_leaves_out_what_it_says():
    core = engine()
    core.add(make_request("a", [1], max_tokens=8, ignore_eos=True))
    core.step()
    core.add(make_request("b", [1], max_tokens=8, ignore_eos=True))
    core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert set(core.step().num_scheduled_tokens) == {"a"}
    assert core.scheduler.get_num_unfinished_requests() == 1
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert core.step().num_scheduled_tokens == {}
    assert not core.scheduler.has_requests()
    core.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert set(core.step().num_scheduled_tokens) == {"a", "b"}


def test_prefills_can_be_held_back_for_a_step():
    core = engine()
    core.add(make_request("a", [1], max_tokens=8))
    assert core.scheduler.schedule(throttle_prefills=True).num_scheduled_tokens == {}
    assert set(core.step().num_scheduled_tokens) == {"a"}


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
