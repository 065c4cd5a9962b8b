from __future__ import annotations

import shutil

import msgspec
import pytest

from hardpoint import __version__
from hardpoint.config.agreement import BOTH, OWN, difference, facts_of
from hardpoint.config.engine_args import EngineArgs
from hardpoint.config.flags import ENGINE_FLAGS


@pytest.fixture
def facts(tiny_llama):
    def facts(model=tiny_llama, **values):
        args = EngineArgs(model=str(model), **values)
        return facts_of(args, args.create_engine_config("server"))

    return facts


def test_the_lists_name_flags_that_there_are():
    assert {flag.dest for flag in ENGINE_FLAGS} >= OWN | BOTH
    assert not OWN & BOTH


def test_the_same_model_in_another_place_is_the_same(facts, tiny_llama, tmp_path):
    copy = shutil.copytree(tiny_llama, tmp_path / "copy")
    engine, front_end = facts(), facts(copy, served_model_name="x", generation_config="vllm", request_timeout=3.0)
    assert (engine.version, front_end.model) == (__version__, str(copy))
    assert difference(engine, front_end) is None


def test_other_weights_under_the_same_shape_are_another_model(facts, tiny_llama, tmp_path):
    copy = shutil.copytree(tiny_llama, tmp_path / "copy")
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-100] ^= 1
    weights.write_bytes(data)
    assert f"another model: {tiny_llama}" in difference(facts(), facts(copy))


def test_without_weights_the_name_decides(facts, tiny_llama, tmp_path):
    copy = shutil.copytree(tiny_llama, tmp_path / "copy")
    (copy / "model.safetensors").unlink()
    assert facts(copy).weights == ""
    assert "another model" in difference(facts(), facts(copy))
    assert difference(facts(), msgspec.structs.replace(facts(copy), model=str(tiny_llama))) is None


def test_another_shape_or_version_is_refused(facts, make_tiny_llama):
    assert "another model" in difference(facts(), facts(make_tiny_llama(num_hidden_layers=1)))
    older = msgspec.structs.replace(facts(), version="0.0.1")
    assert difference(older, facts()) == f"the engine is Hardpoint 0.0.1, the front end {__version__}"


@pytest.mark.parametrize(
    ("engine", "front_end", "flag"),
    [
        ({"dtype": "float32"}, {}, None),
        ({"max_num_seqs": 4, "additional_config": {"x": [1]}}, {"max_num_seqs": 4}, None),
        ({"additional_config": {"a": 1, "b": 2}}, {"additional_config": {"b": 2, "a": 1}}, None),
        ({}, {"gpu_memory_utilization": 0.92}, None),
        ({"shutdown_timeout": 3}, {"shutdown_timeout": 4, "request_timeout": 2.0}, None),
        ({}, {"dtype": "float32"}, "--dtype"),
        ({"seed": 1}, {"seed": 2}, "--seed"),
        ({"max_logprobs": 5}, {}, "--max-logprobs"),
        ({"scheduling_policy": "priority"}, {}, "--scheduling-policy"),
        ({"hf_overrides": {"rope_theta": 5000.0}}, {}, "--hf-overrides"),
        (
            {"additional_config": {"x": 1}},
            {"additional_config": {"x": 2}, "dtype": "half"},
            "--additional-config, --dtype",
        ),
    ],
)
def test_flags_of_the_front_end_must_be_those_of_the_engine(facts, engine, front_end, flag):
    found = difference(facts(**engine), facts(**front_end))
    assert found == (flag and f"the engine was started with another value of {flag} than the front end")


def test_no_secret_is_told_even_as_a_digest(facts):
    told = facts(hf_token="hf_secret", plugin_config=["acme.key=1"]).flags
    assert told == {}
