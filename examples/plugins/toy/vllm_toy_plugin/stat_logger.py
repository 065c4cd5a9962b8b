"""The toy stat logger: counts generated tokens and says so now and then."""

from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase

logger = init_logger("vllm.toy_plugin")


class ToyStatLogger(StatLoggerBase):
    """One per engine; lives in the front end."""

    def __init__(self, vllm_config, engine_index: int = 0):
        self.engine_index = engine_index
        self.generated = 0

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        """Called for each batch of engine outputs."""
        if iteration_stats is not None:
            self.generated += iteration_stats.num_generation_tokens

    def log(self):
        """Called every VLLM_LOG_STATS_INTERVAL seconds."""
        logger.info("toy: engine %d generated %d tokens", self.engine_index, self.generated)

    def log_engine_initialized(self):
        """Called once, when the engine can serve."""
        logger.info("toy: engine %d is ready", self.engine_index)
