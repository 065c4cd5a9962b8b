"""The worker: the built-in one, which also says and counts what it does for its role."""

from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker

from afd_like import settings

logger = init_logger("vllm.afd_like")


class AfdLikeWorker(Worker):
    """Built in the process that runs the model, from the class path in `parallel_config.worker_cls`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.afd = settings.read(self.vllm_config)
        self.afd_steps = 0

    def load_model(self, **kwargs) -> None:
        """Load the model, then say which half this worker would run."""
        super().load_model(**kwargs)
        logger.info("afd_like: worker %d is ready for %s with %d peers", self.rank, self.afd.role, self.afd.peers)

    def execute_model(self, scheduler_output):
        """Run a step and count it."""
        self.afd_steps += scheduler_output.total_num_scheduled_tokens > 0
        return super().execute_model(scheduler_output)

    def afd_state(self) -> dict:
        """For `collective_rpc("afd_state")`."""
        return {"role": self.afd.role, "peers": self.afd.peers, "steps": self.afd_steps}
