"""A configuration crosses processes whole, without pickle, and refuses what cannot cross."""

from __future__ import annotations

import collections

import msgspec
import pytest

from hardpoint.config.sections import CompilationMode, ModelConfig, VllmConfig
from hardpoint.config.wire import from_wire, to_wire
from hardpoint.errors import ConfigError


def test_round_trip_is_equal(llama_folder, probe):
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(llama_folder({"temperature": 0.5})), logits_processors=[collections.OrderedDict]
        ),
        additional_config={"afd": {"role": "attention", "ports": [1, 2]}, "pair": (1, "x"), "set": {3}},
    )
    config.compilation_config.static_forward_context["layer"] = object()
    back = from_wire(to_wire(config))
    assert back.model_config == config.model_config
    assert back.model_config.logits_processors == [collections.OrderedDict]
    assert back.model_config.hf_text_config is back.model_config.hf_config
    assert back.additional_config == config.additional_config
    assert back.compilation_config.mode is CompilationMode.NONE
    assert back.compilation_config.static_forward_context == {}
    assert back.cache_config == config.cache_config
    assert back.is_settled


def test_a_class_that_cannot_be_imported_is_refused_where_it_stands():
    class Local:
        pass

    config = VllmConfig()
    config.scheduler_config.scheduler_cls = Local
    with pytest.raises(ConfigError, match=r"vllm_config\.scheduler_config\.scheduler_cls.*in a function"):
        to_wire(config)


def test_an_object_in_additional_config_is_refused_when_it_is_set():
    with pytest.raises(ConfigError, match=r"additional_config\.lock is a object"):
        VllmConfig(additional_config={"lock": object()})


def test_a_forged_section_name_is_refused():
    tag = "\u0000"
    with pytest.raises(ConfigError, match="no configuration section 'Popen'"):
        from_wire(msgspec.msgpack.encode({tag + "section": "Popen", tag + "fields": {}}))
    with pytest.raises(ConfigError, match="not a configuration"):
        from_wire(msgspec.msgpack.encode({"a": 1}))


def test_digest_ignores_the_instance_and_sees_the_rest():
    one, two = VllmConfig(), VllmConfig()
    assert one.instance_id != two.instance_id or one.instance_id == ""
    assert one.compute_hash() == two.compute_hash()
    two.cache_config.block_size = 64
    assert one.compute_hash() != two.compute_hash()
