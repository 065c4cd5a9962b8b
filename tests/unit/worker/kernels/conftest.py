from __future__ import annotations

import pytest

from hardpoint.worker.kernels.library import kernels


@pytest.fixture
def library():
    """The kernels with two threads; what a test chooses is undone."""
    found = kernels()
    assert found is not None, (
        "the kernels were not built: python csrc/build.py src/hardpoint/worker/kernels/libhardpoint.so"
    )
    before, threads = found.isa, found.threads
    found.set_threads(2)
    yield found
    found.use_isa(before)
    found.set_threads(threads)
