"""We override no class; the example stands for one."""

from __future__ import annotations

from example_plugins import load_example

from hardpoint.testing import check_model


def test_the_example():
    check_model(load_example("model_class_overrides").AcmeLlama)
