"""A process per rank that somebody else started, such as torchrun: this one holds the worker of its own rank."""

from __future__ import annotations

import os
from typing import Any

from hardpoint.engine_core.executors.uni import UniProcExecutor
from hardpoint.errors import ConfigError
from hardpoint.extensions.refs import load_ref

# A worker's module: we hold a worker, and import none.
_WORLD = "hardpoint.worker.distributed.parallel_state:get_world_group"
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ExternalLauncherExecutor(UniProcExecutor):
    """The worker of this process's rank. Every rank runs the same script, and plans the same steps for it.

    The ranks must be given the same requests in the same order, in the script's own process; the answers are
    the same in each.
    """

    supports_pp = False

    def _init_executor(self) -> None:
        rank, local_rank, ranks = self._place()
        if ranks != self.parallel_config.world_size:
            raise ConfigError(
                f"the launcher started {ranks} ranks, the configuration has {self.parallel_config.world_size}",
                code="external-launcher",
                origin="WORLD_SIZE in the process environment",
                fix="start as many as tensor_parallel_size says",
            )
        self._start_worker("env://", rank, local_rank)

    def _place(self) -> tuple[int, int, int]:
        """Rank, rank on this machine, number of ranks."""
        missing = [name for name in _VARIABLES if not os.environ.get(name)]
        if missing:
            raise ConfigError(
                f"the external_launcher executor needs {', '.join(missing)} in the environment",
                code="external-launcher",
                fix="start the script with torchrun, or use another executor",
            )
        if self.parallel_config.pipeline_parallel_size > 1:
            raise ConfigError(
                "the external_launcher executor has no pipeline stages: each rank answers with its own results",
                code="external-launcher",
                fix="use --tensor-parallel-size, or the mp or ray executor",
            )
        return int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """No: what is planned must not depend on how fast a rank is."""
        return False

    def determine_available_memory(self) -> list[int]:
        """The least of all ranks: each plans the same blocks."""
        own = super().determine_available_memory()
        return self.collective_rpc(_least_of_all_ranks, args=(own[0],))


def _least_of_all_ranks(worker: Any, own: int) -> int:
    return min(load_ref(_WORLD)().all_gather_object(own))
