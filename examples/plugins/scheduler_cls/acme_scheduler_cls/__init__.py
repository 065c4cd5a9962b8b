"""A scheduler that plans for one request at a time: `--scheduler-cls acme_scheduler_cls.AcmeScheduler`."""

from typing import Any

from hardpoint.engine_core.scheduler.default import Scheduler


class AcmeScheduler(Scheduler):
    """Derives from ours and changes one number. To plan in another way derive from `SchedulerInterface`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_num_running_reqs = 1
