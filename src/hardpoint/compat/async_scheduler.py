"""The base class of schedulers that plan a step while another runs. A plugin may name it, an engine may not use it."""

from __future__ import annotations

from typing import Any

from hardpoint.engine_core.scheduler.default import Scheduler
from hardpoint.errors import ConfigError


class AsyncScheduler(Scheduler):
    """Lets modules that derive from it be imported; building one is refused.

    A plugin often ships a synchronous and an asynchronous scheduler side by side.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            f"{type(self).__qualname__} schedules asynchronously, which is not available yet",
            code="scheduler-async",
            origin="scheduler_config.scheduler_cls",
            fix="choose a class that derives from vllm.v1.core.sched.scheduler.Scheduler",
        )
