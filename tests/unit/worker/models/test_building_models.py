"""How a model's constructor is called, and who decides its quantisation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hardpoint import platforms
from hardpoint.config.current import get_current_model_prefix, get_current_vllm_config
from hardpoint.config.engine_args import EngineArgs
from hardpoint.contracts.model import SupportsQuant
from hardpoint.contracts.platform import DeviceCapability
from hardpoint.contracts.quantization import QuantizationConfig
from hardpoint.errors import ConfigError
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.registry import isolated
from hardpoint.platforms.cpu import CpuPlatform
from hardpoint.worker.layers.linear import LinearBase, UnquantizedLinearMethod
from hardpoint.worker.loaders import building, get_model
from hardpoint.worker.loaders.building import build_without_weights
from hardpoint.worker.models.building import initialize_model
from hardpoint.worker.models.llama import LlamaForCausalLM
from hardpoint.worker.models.loading import WeightsMapper, init_vllm_registered_model
from hardpoint.worker.models.registry import ModelRegistry
from hardpoint.worker.quantization.gguf import GGUFConfig
from hardpoint.worker.quantization.registry import (
    QUANTIZATION_METHODS,
    get_quantization_config,
    register_quantization_config,
)
from hardpoint.worker.quantization.resolve import get_quant_config


@pytest.fixture(autouse=True)
def fresh():
    with isolated():
        yield
    platforms.reset_current_platform()


def configure(folder, **options):
    return EngineArgs(model=str(folder), dtype="float32", skip_tokenizer_init=True, **options).create_engine_config()


def serve(cls, folder, **options):
    ModelRegistry.register_model("LlamaForCausalLM", cls)
    config = configure(folder, load_format="dummy", **options)
    return get_model(vllm_config=config), config


class Generating(nn.Module):
    """What a front end asks of a model class, computing nothing."""

    def embed_input_ids(self, input_ids):
        return input_ids

    def forward(self, input_ids, positions):
        return input_ids

    def compute_logits(self, hidden_states):
        return hidden_states


def test_a_constructor_gets_config_and_prefix_inside_the_current_config(tiny_llama):
    class Probe(Generating):
        def __init__(self, *, vllm_config, prefix=""):
            super().__init__()
            self.seen = (get_current_vllm_config() is vllm_config, prefix, get_current_model_prefix())
            self.weight = nn.Parameter(torch.empty(2))
            self.dtype = torch.get_default_dtype()

    model, _ = serve(Probe, tiny_llama)
    assert model.seen == (True, "", "")
    assert (model.dtype, model.weight.dtype) == (torch.float32, torch.float32)
    config = configure(tiny_llama, load_format="dummy")
    config.model_config.__dict__["dtype"] = torch.bfloat16
    assert get_model(vllm_config=config).dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32


def test_an_old_constructor_is_warned_about_and_given_what_it_names(tiny_llama):
    class Old(nn.Module):
        def __init__(self, config, cache_config=None, lora_config="unset"):
            super().__init__()
            self.given = (config, cache_config, lora_config)

    config = configure(tiny_llama, load_format="dummy")
    with pytest.warns(DeprecationWarning, match="Trying to guess the arguments for old-style model class"):
        model = initialize_model(config, model_class=Old)
    assert model.given == (config.model_config.hf_config, config.cache_config, None)


def test_a_model_inside_another(tiny_llama):
    class Outer(Generating):
        def __init__(self, *, vllm_config, prefix=""):
            super().__init__()
            self.inner = init_vllm_registered_model(
                vllm_config, prefix="inner", hf_config=vllm_config.model_config.hf_config, architectures=["Inner"]
            )

    ModelRegistry.register_model("Inner", type("Inner", (LlamaForCausalLM,), {}))
    model, config = serve(Outer, tiny_llama)
    assert type(model.inner).__name__ == "Inner"
    assert config.model_config.architectures == ["LlamaForCausalLM"]
    assert list(config.compilation_config.static_forward_context) == [
        "inner.model.layers.0.self_attn.attn",
        "inner.model.layers.1.self_attn.attn",
    ]


def test_two_layers_of_one_name_are_refused(tiny_llama):
    config = configure(tiny_llama)
    initialize_model(config)
    with pytest.raises(ValueError, match="Duplicate layer name"):
        initialize_model(config)


def test_a_model_is_built_without_weights_to_see_what_it_is_made_of(tiny_llama, smollm2_gguf, monkeypatch):
    built = []
    monkeypatch.setattr(building, "initialize_model", lambda *a, **k: built.append(initialize_model(*a, **k)))
    for path in (tiny_llama, smollm2_gguf):
        build_without_weights(configure(path))
        assert {parameter.device.type for parameter in built[-1].parameters()} == {"meta"}
    assert torch.get_default_dtype() == torch.float32


def test_a_constructor_that_needs_memory_is_no_error_and_another_fault_is(tiny_llama):
    class Looking(Generating):
        def __init__(self, *, vllm_config, prefix=""):
            super().__init__()
            torch.ones(2).sum().item()

    class Wrong(Generating):
        def __init__(self, *, vllm_config, prefix=""):
            raise RuntimeError("wrong")

    ModelRegistry.register_model("LlamaForCausalLM", Looking)
    build_without_weights(configure(tiny_llama))
    assert (
        "was not built: without memory its constructor raises" in ledger.entries(kind="skip", key="models")[-1].detail
    )
    ModelRegistry.register_model("LlamaForCausalLM", Wrong)
    with pytest.raises(RuntimeError, match="wrong"):
        build_without_weights(configure(tiny_llama))


# Quantisation


class Noting(QuantizationConfig):
    """Plain weights; notes what it is asked."""

    def __init__(self, settings):
        super().__init__()
        self.settings, self.mapper, self.prefixes = settings, None, []

    def get_name(self):
        return "noting"

    def get_supported_act_dtypes(self):
        return [torch.float32]

    @classmethod
    def get_min_capability(cls):
        return 80

    @staticmethod
    def get_config_filenames():
        return ["noting.json"]

    @classmethod
    def from_config(cls, config):
        return cls(config)

    def get_quant_method(self, layer, prefix):
        self.prefixes.append(prefix)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

    def apply_vllm_mapper(self, mapper):
        self.mapper = mapper

    def maybe_update_config(self, model_name, hf_config=None, revision=None):
        self.updated = (model_name, hf_config.model_type, revision)


def test_a_registered_method_serves_a_model(make_tiny_llama):
    assert register_quantization_config("noting")(Noting) is Noting
    assert "noting" in QUANTIZATION_METHODS
    assert get_quantization_config("noting") is Noting
    folder = make_tiny_llama(quantization_config={"quant_method": "noting", "bits": 3})
    config = configure(folder)
    model = get_model(vllm_config=config)
    found = config.quant_config
    assert model.quant_config is found
    assert found.settings["bits"] == 3
    assert found.updated == (str(folder), "llama", None)
    assert found.packed_modules_mapping == LlamaForCausalLM.packed_modules_mapping
    assert "model.layers.1.self_attn.qkv_proj" in found.prefixes
    assert "lm_head" in found.prefixes


def test_settings_may_lie_beside_the_weights(make_tiny_llama):
    register_quantization_config("noting")(Noting)
    folder = make_tiny_llama()
    (folder / "noting.json").write_text('{"bits": 5}')
    config = configure(folder, quantization="noting")
    get_model(vllm_config=config)
    assert config.quant_config.settings == {"bits": 5}


def test_the_model_class_tells_its_names_to_the_method(tiny_llama):
    register_quantization_config("noting")(Noting)

    class Mapped(LlamaForCausalLM, SupportsQuant):
        hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"a.": "b."})

    _, config = serve(Mapped, tiny_llama, quantization="noting")
    assert config.quant_config.mapper is Mapped.hf_to_vllm_mapper


def test_a_plugins_method_may_claim_a_checkpoint_before_ours(make_tiny_llama, monkeypatch):
    monkeypatch.setattr(GGUFConfig, "override_quantization_method", classmethod(lambda cls, *a, **k: "gguf"))

    @register_quantization_config("claiming")
    class Claiming(Noting):
        @classmethod
        def override_quantization_method(cls, hf_quant_cfg, user_quant, hf_config=None):
            return "claiming" if hf_quant_cfg["quant_method"] == "noting" else None

    register_quantization_config("noting")(Noting)
    config = configure(make_tiny_llama(quantization_config={"quant_method": "noting"}))
    assert type(get_quant_config(config.model_config, config.load_config)) is Claiming


def test_what_cannot_be_is_refused(make_tiny_llama, tiny_llama):
    with pytest.raises(ValueError, match="Invalid quantization method: nope"):
        get_quantization_config("nope")
    with pytest.raises(ValueError, match="QuantizationConfig"):
        register_quantization_config("broken")(dict)
    assert "broken" not in QUANTIZATION_METHODS
    register_quantization_config("noting")(Noting)
    config = configure(tiny_llama, quantization="noting")
    config.model_config.__dict__["dtype"] = torch.bfloat16
    with pytest.raises(ConfigError, match=r"bfloat16.*noting.*float32"):
        get_quant_config(config.model_config, config.load_config)
    with pytest.raises(ConfigError, match="fp8"):
        configure(make_tiny_llama(quantization_config={"quant_method": "fp8"}))


def test_a_device_may_be_too_old(tiny_llama):
    class Old(CpuPlatform):
        @classmethod
        def get_device_capability(cls, device_id=0):
            return DeviceCapability(7, 5)

    register_quantization_config("noting")(Noting)
    platforms.set_current_platform(Old)
    config = configure(tiny_llama, quantization="noting")
    with pytest.raises(ValueError, match=r"Minimum capability: 80\. Current capability: 75"):
        get_quant_config(config.model_config, config.load_config)


def test_a_platform_with_a_list_of_methods_is_told_of_new_ones():
    listing = type("Listing", (CpuPlatform,), {"supported_quantization": ["gguf"]})
    platforms.set_current_platform(listing)
    register_quantization_config("noting")(Noting)
    assert listing.supported_quantization == ["gguf", "noting"]
