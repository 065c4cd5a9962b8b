"""The suite for schedulers notices plans that no worker could follow, and answers that are not the request's."""

from __future__ import annotations

import pytest

from hardpoint.engine_core.scheduler.default import Scheduler
from hardpoint.testing import ContractFailure, check_scheduler


def changed(**methods):
    return type("Bad", (Scheduler,), methods)


def test_a_good_one():
    check_scheduler(Scheduler)
    check_scheduler(type("Mine", (Scheduler,), {}))


def over_budget(self, throttle_prefills=False):
    plan = Scheduler.schedule(self, throttle_prefills)
    plan.total_num_scheduled_tokens += 1000
    return plan


def miscounts(self, throttle_prefills=False):
    plan = Scheduler.schedule(self, throttle_prefills)
    plan.total_num_scheduled_tokens = 0
    return plan


def swaps_blocks(self, throttle_prefills=False):
    plan = Scheduler.schedule(self, throttle_prefills)
    new = plan.scheduled_new_reqs
    if len(new) > 1:
        new[0].block_ids, new[1].block_ids = new[1].block_ids, new[0].block_ids
    for one in new[:1]:
        one.block_ids = ([block + 1 for block in one.block_ids[0]],)
    return plan


def keeps_outputs(self, plan, result):
    by_client = Scheduler.update_from_output(self, plan, result)
    for batch in by_client.values():
        batch.outputs = batch.outputs[1:]
    return by_client


def forgets_to_tell_workers(self, throttle_prefills=False):
    plan = Scheduler.schedule(self, throttle_prefills)
    plan.finished_req_ids = set()
    return plan


def never_plans(self, throttle_prefills=False):
    return Scheduler.schedule(self, throttle_prefills=True)


def ends_nothing(self, request_ids, finished_status):
    Scheduler.finish_requests(self, request_ids, finished_status)
    return []


def fails(self, *args, **kwargs):
    raise KeyError("r0")


@pytest.mark.parametrize(
    ("cls", "what"),
    [
        (dict, "does not derive from"),
        (changed(__init__=lambda self, vllm_config: None), "cannot be called as the host calls it"),
        (changed(schedule=over_budget), r"a step has 10\d\d tokens of 24"),
        (changed(schedule=miscounts), "total_num_scheduled_tokens is not the sum"),
        (changed(schedule=swaps_blocks), "a worker that follows its plan raises"),
        (changed(schedule=forgets_to_tell_workers), "the workers were never told"),
        (changed(schedule=never_plans), "makes no progress"),
        (changed(schedule=fails), "schedule raises KeyError"),
        (changed(update_from_output=keeps_outputs), "gets .* tokens, not the"),
        (changed(update_from_output=fails), "update_from_output raises KeyError"),
        (changed(finish_requests=ends_nothing), r"finish_requests returns \[\]"),
        (changed(set_pause_state=lambda self, state: None), "after a pause"),
        (changed(reset_prefix_cache=lambda self, *a, **k: None), "reset_prefix_cache gives None"),
        (changed(make_stats=lambda self: 3), "make_stats gives 3"),
        (changed(get_request_counts=lambda self: (1, 0)), "it counts"),
        (changed(shutdown=fails), "shutdown raises KeyError"),
    ],
)
def test_bad_ones(cls, what):
    with pytest.raises(ContractFailure, match=what):
        check_scheduler(cls)
