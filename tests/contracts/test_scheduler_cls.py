from __future__ import annotations

import pytest

from hardpoint.engine_core.scheduler.async_scheduler import AsyncScheduler
from hardpoint.engine_core.scheduler.default import Scheduler
from hardpoint.testing import check_scheduler


@pytest.mark.parametrize("scheduler", [Scheduler, AsyncScheduler])
def test_the_built_in_schedulers(scheduler):
    check_scheduler(scheduler)


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
