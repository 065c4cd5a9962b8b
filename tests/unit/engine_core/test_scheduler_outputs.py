"""When an output ends, what is sent, and what aborts and pauses do: each rule by itself."""

from __future__ import annotations

import numpy as np
import pytest
from engine_fakes import EOS, Engine, answer, engine, make_config, make_request, make_scheduler, prefix_hits

from hardpoint.contracts.scheduler import PauseState
from hardpoint.engine_core.request import Request
from hardpoint.engine_core.scheduler.stopping import check_stop, repeats_at_end
from hardpoint.types.finish import FinishReason, RequestStatus
from hardpoint.types.logprobs import LogprobsLists
from hardpoint.types.messages import EngineCoreEventType
from hardpoint.types.sampling_params import RepetitionDetectionParams
from hardpoint.types.schedule import NO_TOKEN_LEFT

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
