"""How the engine core reaches its workers: `--distributed-executor-backend acme_executor_class.AcmeExecutor`."""

import logging
import time
from typing import Any

from hardpoint.engine_core.executors.uni import UniProcExecutor

logger = logging.getLogger(__name__)


class AcmeExecutor(UniProcExecutor):
    """Derives from the one for a single worker. For workers elsewhere derive from `Executor`."""

    seconds = 0.0

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Run a step on every worker."""
        started = time.perf_counter()
        try:
            return super().execute_model(scheduler_output, non_block)
        finally:
            self.seconds += time.perf_counter() - started

    def shutdown(self) -> None:
        """Say how long it took."""
        logger.info("acme: the workers took %.3f s", self.seconds)
        super().shutdown()
