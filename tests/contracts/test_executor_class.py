from __future__ import annotations

from hardpoint.engine_core.executors.uni import UniProcExecutor
from hardpoint.testing import check_executor


def test_the_executor_with_the_worker_inside():
    check_executor(UniProcExecutor)


def test_the_executor_with_a_process_per_worker():
    from hardpoint.engine_core.executors.mp import MultiprocExecutor

    check_executor(MultiprocExecutor)
