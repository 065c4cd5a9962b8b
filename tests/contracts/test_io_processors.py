"""We ship no IO processor; the example stands for one."""

from __future__ import annotations

from example_plugins import load_example

from hardpoint.testing import check_io_processor


def test_the_example():
    check_io_processor(load_example("io_processors", "processor").AcmeProcessor, {"texts": ["a"]})
