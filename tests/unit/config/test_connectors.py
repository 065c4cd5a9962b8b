"""Module paths of connectors: the class is found and held against its constructor's form, then refused by name."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest

from hardpoint.config.arguments import FlexibleArgumentParser
from hardpoint.config.engine_args import AsyncEngineArgs, EngineArgs
from hardpoint.config.sections import KVTransferConfig
from hardpoint.errors import ConfigError


class Good:
    def __init__(self, vllm_config, role, kv_cache_config=None):
        pass


class Old:
    def __init__(self, vllm_config, role):
        pass


@pytest.fixture(autouse=True)
def module(monkeypatch):
    found = ModuleType("some_connector")
    found.Good, found.Old, found.number = Good, Old, 3
    monkeypatch.setitem(sys.modules, "some_connector", found)


def start(**sections):
    EngineArgs(model="nowhere", **sections).create_engine_config()


def kv(name, path="some_connector"):
    start(kv_transfer_config={"kv_connector": name, "kv_role": "kv_both", "kv_connector_module_path": path})


def ec(name, path="some_connector"):
    start(ec_transfer_config={"ec_connector": name, "ec_role": "ec_producer", "ec_connector_module_path": path})


@pytest.mark.parametrize(
    ("choose", "name", "path", "message"),
    [
        (kv, "Good", "", "kv_connector_module_path is empty"),
        (kv, None, "some_connector", "kv_connector does not say which class"),
        (kv, "Good", "gone.connector", "'gone.connector' cannot be imported: .*No module named 'gone'"),
        (kv, "Gone", "some_connector", "'Gone': the module some_connector has nothing of that name"),
        (kv, "number", "some_connector", "has a int there"),
        (kv, "Old", "some_connector", "constructor of .*Old does not take kv_cache_config"),
        (kv, "Good", "some_connector", "kv_transfer_config=.* is refused: moving the KV cache .* not supported yet"),
        (ec, "Gone", "some_connector", "'Gone': the module some_connector has nothing of that name"),
        (ec, "Old", "some_connector", "ec_transfer_config=.* is refused: .* not supported yet"),
    ],
)
def test_the_class_is_looked_at_before_it_is_refused(choose, name, path, message):
    with pytest.raises(ConfigError, match=message):
        choose(name, path)


def test_a_section_object_and_the_flag_are_looked_at_too():
    with pytest.raises(ConfigError, match="has nothing of that name"):
        start(kv_transfer_config=KVTransferConfig(kv_connector="Gone", kv_connector_module_path="some_connector"))
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    given = json.dumps({"kv_connector": "Gone", "kv_connector_module_path": "some_connector"})
    with pytest.raises(ConfigError, match="has nothing of that name"):
        AsyncEngineArgs.from_cli_args(parser.parse_args(["--kv-transfer-config", given]))
