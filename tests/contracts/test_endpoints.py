"""We ship no endpoint plugin; the example stands for one."""

from __future__ import annotations

from types import SimpleNamespace

from example_plugins import load_example

from hardpoint.testing import check_endpoint_plugin


def test_the_example():
    client = SimpleNamespace(model_config=SimpleNamespace(served_model_name="m"))
    check_endpoint_plugin(load_example("endpoints").AcmeEndpoint, engine_client=client)
