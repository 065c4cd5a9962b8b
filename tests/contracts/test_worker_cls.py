from __future__ import annotations

from hardpoint.testing import check_worker
from hardpoint.worker.device_worker import Worker


def test_the_built_in_worker():
    check_worker(Worker)
