from __future__ import annotations

from hardpoint.engine_core.scheduler.default import Scheduler
from hardpoint.testing import check_scheduler


def test_the_built_in_scheduler():
    check_scheduler(Scheduler)
