"""A stat logger: one object per engine in the front end, given the numbers of every step."""

import logging
from typing import Any

from hardpoint.contracts.stat_logger import StatLoggerBase

logger = logging.getLogger(__name__)


class AcmeStatLogger(StatLoggerBase):
    """Counts tokens. `record` is on the path of every answer, so it only adds up; `log` writes."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.engine_index = engine_index
        self.model = vllm_config.model_config.served_model_name
        self.prompt_tokens = 0
        self.generated_tokens = 0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """After each step; any of the statistics may be None."""
        if iteration_stats is not None:
            self.prompt_tokens += iteration_stats.num_prompt_tokens
            self.generated_tokens += iteration_stats.num_generation_tokens

    def log(self) -> None:
        """Every VLLM_LOG_STATS_INTERVAL seconds, on a thread of its own."""
        if self.prompt_tokens or self.generated_tokens:
            logger.info("acme: %s read %d tokens and wrote %d", self.model, self.prompt_tokens, self.generated_tokens)

    def log_engine_initialized(self) -> None:
        """Once, when the engine can serve."""
        logger.info("acme: engine %d serves %s", self.engine_index, self.model)
