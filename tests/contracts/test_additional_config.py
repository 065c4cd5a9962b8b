"""The bag reaches who reads it, unchanged, in every process."""

from __future__ import annotations

from hardpoint.config.wire import from_wire, to_wire
from hardpoint.testing import engine_here, tiny_vllm_config

BAG = {"acme": {"ban": [5], "deep": {"x": 1.5, "y": None, "z": "text"}}}


def test_it_crosses_processes_as_it_is():
    assert from_wire(to_wire(tiny_vllm_config(additional_config=BAG))).additional_config == BAG


def test_workers_see_it():
    with engine_here(additional_config=BAG) as llm:
        assert llm.collective_rpc(lambda worker: worker.vllm_config.additional_config) == [BAG]
