from __future__ import annotations

import pytest
from schedulers_from_scratch import OneByOne, OneByOneAhead

from hardpoint.engine_core.scheduler.async_scheduler import AsyncScheduler
from hardpoint.engine_core.scheduler.default import Scheduler
from hardpoint.testing import check_scheduler, engine_here
from hardpoint.types.sampling_params import SamplingParams


@pytest.mark.parametrize("scheduler", [Scheduler, AsyncScheduler, OneByOne, OneByOneAhead])
def test_built_in_schedulers_and_such_as_share_no_code_with_them(scheduler):
    check_scheduler(scheduler)


def test_schedulers_from_scratch_run_an_engine():
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=n % 2 == 0) for n in (5, 8, 3)]
    prompts = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (4, 30, 1)]
    found = {}
    for scheduler in (None, OneByOne, OneByOneAhead):
        with engine_here(scheduler_cls=scheduler) as llm:
            answers = llm.generate(prompts, params, use_tqdm=False)
            found[scheduler] = [list(answer.outputs[0].token_ids) for answer in answers]
    assert found[OneByOne] == found[OneByOneAhead] == found[None]


def test_a_scheduler_that_only_says_that_it_plans_ahead_is_found_out():
    class Boastful(Scheduler):
        @classmethod
        def supports_async_scheduling(cls):
            return True

        def _update_after_schedule(self, scheduler_output):
            super()._update_after_schedule(scheduler_output)
            for request_id in scheduler_output.num_scheduled_tokens:
                self.requests[request_id].num_output_placeholders = 1

    with pytest.raises(AssertionError, match="Boastful"):
        check_scheduler(Boastful)
