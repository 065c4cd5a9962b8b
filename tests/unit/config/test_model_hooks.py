"""What plugins say about models while the configuration is made."""

from __future__ import annotations

import pytest

from hardpoint.config import model_hooks
from hardpoint.config.engine_args import EngineArgs
from hardpoint.config.fallback import causal_models
from hardpoint.config.model_hooks import CONFIG_REGISTRY, MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from hardpoint.errors import ConfigError, ModelFileError


@pytest.fixture(autouse=True)
def _tables(monkeypatch):
    """Tables of the test's own."""
    monkeypatch.setattr(model_hooks, "MODELS_CONFIG_MAP", {})
    monkeypatch.setattr(model_hooks, "CONFIG_REGISTRY", {})
    yield
    assert MODELS_CONFIG_MAP == {}
    assert CONFIG_REGISTRY == {}


def config(folder, **options):
    return EngineArgs(model=str(folder), skip_tokenizer_init=True, **options).create_engine_config()


class Shorter(VerifyAndUpdateConfig):
    @staticmethod
    def verify_and_update_model_config(model_config):
        model_config.hf_config.max_position_embeddings = 96

    @staticmethod
    def verify_and_update_config(vllm_config):
        vllm_config.cache_config.enable_prefix_caching = False


class Refuses(VerifyAndUpdateConfig):
    @staticmethod
    def verify_and_update_config(vllm_config):
        raise ValueError("not on a Sunday")


def test_the_hook_of_a_model_changes_the_configuration(tiny_llama):
    model_hooks.MODELS_CONFIG_MAP["LlamaForCausalLM"] = Shorter
    found = config(tiny_llama)
    assert found.model_config.max_model_len == 96
    assert found.cache_config.enable_prefix_caching is False


def test_the_hook_of_another_model_is_not_asked_and_one_that_refuses_is_named(tiny_llama):
    model_hooks.MODELS_CONFIG_MAP["OtherForCausalLM"] = Refuses
    config(tiny_llama)
    model_hooks.MODELS_CONFIG_MAP["LlamaForCausalLM"] = Refuses
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM refuses the configuration.*not on a Sunday") as caught:
        config(tiny_llama)
    assert caught.value.origin.endswith("Refuses")


class Stating:
    """Like a config class of transformers."""

    def __init__(self, **values):
        if values.get("hidden_act") == "wrong":
            raise ValueError("no such activation")
        self.values = {**values, "layer_types": ["full_attention"] * values["num_hidden_layers"], "rms_norm_eps": 0.5}

    def to_dict(self):
        return self.values


def test_a_registered_class_states_what_the_file_leaves_unsaid(make_tiny_llama):
    folder = make_tiny_llama(model_type="stating")
    model_hooks.CONFIG_REGISTRY["stating"] = Stating
    found = config(folder).model_config.hf_config
    assert found.layer_types == ["full_attention"] * 2
    assert found.rms_norm_eps == 0.5
    assert found.hidden_size == 64
    with pytest.raises(ModelFileError, match="no such activation"):
        config(make_tiny_llama(model_type="stating", hidden_act="wrong"))


def test_a_class_that_is_registered_with_transformers_counts(make_tiny_llama):
    from transformers import AutoConfig, PretrainedConfig

    class Registered(PretrainedConfig):
        model_type = "registered_in_a_test"

        def __init__(self, spice=7, **more):
            super().__init__(**more)
            self.spice = spice

    AutoConfig.register(Registered.model_type, Registered)
    assert config(make_tiny_llama(model_type=Registered.model_type)).model_config.hf_config.spice == 7


def test_the_models_of_transformers_are_known_without_it():
    assert {"LlamaForCausalLM", "GraniteForCausalLM", "GPTNeoXForCausalLM"} <= causal_models()
    assert "BertForMaskedLM" not in causal_models()
