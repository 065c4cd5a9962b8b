"""A worker class of our own: `--worker-cls acme_worker_cls.AcmeWorker`."""

import logging
from typing import Any

from hardpoint.worker.device_worker import Worker

logger = logging.getLogger(__name__)


class AcmeWorker(Worker):
    """Derives from ours. To drive another device derive from `WorkerBase` and write every method that is called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps = 0

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step."""
        self.steps += 1
        return super().execute_model(scheduler_output)

    def acme_steps(self) -> int:
        """Any method can be called by name: `llm.collective_rpc("acme_steps")`."""
        return self.steps

    def shutdown(self) -> None:
        """Say what was done."""
        logger.info("acme: %d steps", self.steps)
        super().shutdown()
