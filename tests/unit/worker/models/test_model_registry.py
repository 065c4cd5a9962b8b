"""Registering models and finding the class for a checkpoint."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from torch import nn

from hardpoint import platforms
from hardpoint.contracts.model import (
    IntermediateTensors,
    SupportsLoRA,
    SupportsPP,
    VllmModelForTextGeneration,
    attn_type,
    default_pooling_type,
    inspect_model_class,
    is_pooling_model,
    is_text_generation_model,
    is_vllm_model,
    supports_lora,
    supports_pp,
)
from hardpoint.extensions.registry import isolated, registry
from hardpoint.platforms.cpu import CpuPlatform
from hardpoint.types.model_info import BUILT_IN_MODEL_INFO, ModelInfo
from hardpoint.worker.models.llama import LlamaForCausalLM
from hardpoint.worker.models.registry import ModelRegistry, get_model_architecture

PLAIN = SimpleNamespace(model_class_overrides={})


@pytest.fixture(autouse=True)
def fresh():
    with isolated():
        yield
    platforms.reset_current_platform()


class MyModel(LlamaForCausalLM):
    pass


REF = f"{MyModel.__module__}:MyModel"


def resolve(*architectures, config=PLAIN):
    return ModelRegistry.resolve_model_cls(list(architectures), config)


def test_a_class_and_a_string_are_registered():
    ModelRegistry.register_model("A", MyModel)
    ModelRegistry.register_model("B", REF)
    assert {"A", "B", "LlamaForCausalLM"} <= set(ModelRegistry.get_supported_archs())
    assert resolve("A") == (MyModel, "A")
    cls, arch = resolve("B")
    assert (cls.__name__, arch) == ("MyModel", "B")


def test_the_view_of_names_is_live_and_the_dict_can_be_written():
    names = ModelRegistry.get_supported_archs()
    assert "A" not in names
    ModelRegistry.models["A"] = MyModel
    assert "A" in names
    assert ModelRegistry.models.pop("A") is MyModel
    assert "A" not in names


def test_built_in_names_can_be_replaced():
    ModelRegistry.register_model("LlamaForCausalLM", MyModel)
    assert resolve("LlamaForCausalLM")[0] is MyModel


def test_nothing_is_imported_before_it_is_used():
    ModelRegistry.register_model("A", "no_such_package.models:Model")
    assert "no_such_package" not in sys.modules
    with pytest.raises(ValueError, match=r"\['A'\] failed to be inspected. Please check the logs"):
        resolve("A")


@pytest.mark.parametrize("wrong", [None, 5, ("a", "b"), MyModel])
def test_the_architecture_must_be_a_string(wrong):
    with pytest.raises(TypeError, match="`model_arch` should be a string"):
        ModelRegistry.register_model(wrong, MyModel)


@pytest.mark.parametrize("wrong", ["module.Class", "a:b:c", "", ":", "module:", ":Class"])
def test_a_string_must_be_module_and_class(wrong):
    with pytest.raises(ValueError, match="<module>:<class>"):
        ModelRegistry.register_model("A", wrong)


@pytest.mark.parametrize("wrong", [None, 5, object(), lambda: None, dict])
def test_other_things_are_no_models(wrong):
    with pytest.raises(TypeError):
        ModelRegistry.register_model("A", wrong)


def test_the_first_listed_architecture_that_is_known_serves():
    ModelRegistry.register_model("A", MyModel)
    assert resolve("Unknown", "A", "LlamaForCausalLM") == (MyModel, "A")
    ModelRegistry.register_model("Broken", "no_such_package:Model")
    assert resolve("Broken", "A") == (MyModel, "A")


def test_other_endings_of_the_same_kind_are_understood():
    for name in ("LlamaForConditionalGeneration", "LlamaLMHeadModel", "LlamaChatModel"):
        assert resolve(name) == (LlamaForCausalLM, "LlamaForCausalLM")


def test_unknown_architectures_are_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"\['NopeForCausalLM'\] are not supported.*LlamaForCausalLM"):
        resolve("NopeForCausalLM")
    with pytest.raises(ValueError, match="names no architecture"):
        resolve()
    with pytest.raises(ValueError, match=r"plugin.*bart-plugin"):
        resolve("BartForConditionalGeneration")


def test_a_platform_may_refuse_a_model():
    class Strict(CpuPlatform):
        @classmethod
        def verify_model_arch(cls, model_arch):
            raise ValueError(f"not {model_arch} here")

    platforms.set_current_platform(Strict)
    with pytest.raises(ValueError, match="not LlamaForCausalLM here"):
        resolve("LlamaForCausalLM")


def test_overrides_of_a_config_are_registered_once():
    config = SimpleNamespace(model_class_overrides={"LlamaForCausalLM": REF})
    assert resolve("LlamaForCausalLM", config=config)[0].__name__ == "MyModel"
    entry = registry("models").entry("LlamaForCausalLM")
    resolve("LlamaForCausalLM", config=config)
    assert registry("models").entry("LlamaForCausalLM") is entry
    config.architectures = ["LlamaForCausalLM"]
    assert get_model_architecture(config)[1] == "LlamaForCausalLM"


def test_registering_by_string_needs_no_torch():
    code = (
        "import sys; from hardpoint.worker.models.registry import ModelRegistry; "
        "ModelRegistry.register_model('A', 'a.b:C'); assert 'A' in ModelRegistry.get_supported_archs(); "
        "from hardpoint.worker.quantization.registry import QUANTIZATION_METHODS; "
        "from hardpoint.worker.attention.registry import register_backend; register_backend('X_ATTN', 'a.b.C'); "
        "assert 'gguf' in QUANTIZATION_METHODS; assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# What a class declares


@pytest.mark.parametrize("arch", BUILT_IN_MODEL_INFO)
def test_the_stated_facts_about_built_in_models_are_true(arch):
    assert inspect_model_class(registry("models").load(arch)) == BUILT_IN_MODEL_INFO[arch]


def test_facts_are_stated_for_every_built_in_model():
    built_in = {entry.name for entry in registry("models").entries() if entry.built_in}
    assert set(BUILT_IN_MODEL_INFO) == built_in


def test_inspection_reports_what_a_plugins_class_declares():
    ModelRegistry.register_model("A", REF)
    info, arch = ModelRegistry.inspect_model_cls(["A"], PLAIN)
    assert (info, arch) == (
        ModelInfo("MyModel", is_text_generation_model=True, supports_pp=True, supports_lora=True),
        "A",
    )
    assert ModelInfo.from_dict(info.to_dict()) == info
    with pytest.raises(ValueError, match="fields"):
        ModelInfo.from_dict({"architecture": "X"})
    assert ModelRegistry.is_text_generation_model("A", PLAIN)
    assert ModelRegistry.is_pp_supported_model("A", PLAIN)
    assert not ModelRegistry.is_pooling_model("A", PLAIN)


class Minimal(nn.Module):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()

    def embed_input_ids(self, input_ids):
        return input_ids

    def forward(self, input_ids, positions):
        return input_ids

    def compute_logits(self, hidden_states):
        return hidden_states


def variant(**members):
    removed = {name: None for name, value in members.items() if value is None}
    return type("Variant", (Minimal,), {**members, **removed})


def test_what_makes_a_model():
    assert is_vllm_model(Minimal)
    assert is_text_generation_model(Minimal)
    assert isinstance(Minimal(vllm_config=None), VllmModelForTextGeneration)
    assert not is_pooling_model(Minimal)
    assert is_pooling_model(variant(is_pooling_model=True))
    assert not is_vllm_model(variant(__init__=lambda self, config: None))
    assert is_vllm_model(variant(__init__=lambda self, **kwargs: None))
    assert not is_vllm_model(variant(embed_input_ids=None))
    assert not is_vllm_model(variant(forward=lambda self, input_ids: None))
    assert not is_vllm_model(variant(forward=lambda self, ids, positions: None))
    assert is_vllm_model(variant(forward=lambda self, *args, **kwargs: None))
    assert not is_text_generation_model(nn.Linear)


def staged(self, input_ids, positions, intermediate_tensors=None):
    return input_ids


def test_pipeline_stages():
    assert not supports_pp(Minimal)
    assert supports_pp(variant(supports_pp=True, make_empty_intermediate_tensors=lambda: None, forward=staged))
    assert not supports_pp(variant(supports_pp=True, forward=staged))
    assert not supports_pp(variant(supports_pp=True, make_empty_intermediate_tensors=lambda: None))
    derived = type("Derived", (Minimal, SupportsPP), {"forward": staged})
    assert supports_pp(derived)
    assert not supports_pp(type("Derived", (Minimal, SupportsPP), {}))


def test_adapters():
    assert not supports_lora(Minimal)
    assert not supports_lora(variant(supports_lora=True))
    assert supports_lora(variant(supports_lora=True, packed_modules_mapping={}, embedding_modules={}))
    assert supports_lora(type("Derived", (Minimal, SupportsLoRA), {}))


def test_pooling_facts_and_decorators():
    marked = attn_type("encoder_only")(default_pooling_type(seq_pooling_type="CLS")(variant(is_pooling_model=True)))
    info = inspect_model_class(marked)
    assert (info.attn_type, info.default_seq_pooling_type, info.default_tok_pooling_type) == (
        "encoder_only",
        "CLS",
        "ALL",
    )
    scorer = variant(is_pooling_model=True, score_type="cross-encoder")
    assert inspect_model_class(scorer).score_type == "cross-encoder"
    late = type("Late", (nn.Module,), {"score_type": "late-interaction"})
    with pytest.raises(AssertionError, match="different score types"):
        inspect_model_class(type("Both", (scorer, late), {}))


def test_intermediate_tensors():
    import torch

    one = IntermediateTensors({"hidden_states": torch.arange(6).view(3, 2), "residual": torch.ones(3, 2)})
    assert one[1:]["hidden_states"].tolist() == [[2, 3], [4, 5]]
    assert one == IntermediateTensors(dict(one.items()))
    assert one != one[1:]
    one["residual"] = torch.zeros(3, 2)
    assert len(one) == 2
    assert one["residual"].sum() == 0
