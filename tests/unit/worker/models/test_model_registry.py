"""Registering models and finding the class for a checkpoint."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
from torch import nn

from hardpoint import log, platforms
from hardpoint.config.sections import ModelClass, ModelConfig
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
    remarks_on,
    supports_lora,
    supports_pp,
)
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.registry import isolated, registry
from hardpoint.platforms.cpu import CpuPlatform
from hardpoint.types.model_info import BUILT_IN_MODEL_INFO, ModelInfo
from hardpoint.worker.models.llama import LlamaForCausalLM
from hardpoint.worker.models.registry import ModelRegistry, get_model_architecture, inspect_all

PLAIN = SimpleNamespace(model_class_overrides={})


@pytest.fixture(autouse=True)
def fresh():
    with isolated():
        yield
    platforms.reset_current_platform()


class MyModel(LlamaForCausalLM):
    pass


REF = f"{MyModel.__module__}:MyModel"


@pytest.fixture
def said(caplog, monkeypatch):
    """The lines that the model registry logs at a level."""
    monkeypatch.setattr(log, "_seen", set())
    monkeypatch.setattr(logging.getLogger("hardpoint"), "propagate", True)
    caplog.set_level("INFO", logger="hardpoint")
    return lambda level: [r.getMessage() for r in caplog.records if r.levelname == level]


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
    with pytest.raises(ValueError, match=r"\['A'\] failed to be inspected. A: .*there is no module 'no_such_package'"):
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
    ModelRegistry.register_model("Aardvark", REF)
    with pytest.raises(ValueError, match=r"did you mean LlamaForCausalLM.* supported are LlamaForCausalLM, .*Aardvark"):
        resolve("LamaForCasualLM")
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
    with pytest.raises(ValueError, match=r"platform Strict refuses model class LlamaForCausalLM: .*not LlamaForCaus"):
        resolve("LlamaForCausalLM")


def test_overrides_of_a_config_are_registered_once(said):
    config = ModelConfig(model="m", model_class_overrides={"LlamaForCausalLM": REF})
    assert "LlamaForCausalLM" in config.registry.get_supported_archs()
    entry = registry("models").entry("LlamaForCausalLM")
    assert (entry.ref, entry.origin.label) == (REF, "model_class_overrides: LlamaForCausalLM")
    assert resolve("LlamaForCausalLM", config=config)[0].__name__ == "MyModel"
    assert registry("models").entry("LlamaForCausalLM") is entry
    config.hf_config = SimpleNamespace(architectures=["LlamaForCausalLM"])
    assert get_model_architecture(config)[1] == "LlamaForCausalLM"
    (line,) = said("WARNING")
    assert line.startswith("models entry 'LlamaForCausalLM' is replaced: it was hardpoint.worker.models.llama:Llama")
    assert line.endswith(f"(built in), now {REF} [from model_class_overrides: LlamaForCausalLM]")
    resolve("New", config=SimpleNamespace(model_class_overrides={"New": REF}))
    assert said("WARNING")[1:] == [f"model_class_overrides: New is served by {REF}"]


def test_overrides_win_over_what_a_plugin_registers_later():
    config = SimpleNamespace(model_class_overrides={"A": REF})
    resolve("A", config=config)
    ModelRegistry.register_model("A", "another.package:Model")
    assert resolve("A", config=config)[0].__name__ == "MyModel"


# What the front end chose


def chosen(target=REF, path=REF, **more):
    more = {"owner": "somebody", "by_plugin": True, **more}
    made = ModelClass(architecture="A", target=target, path=path, **more)
    return SimpleNamespace(model_class_overrides={}, model_class=made)


@pytest.mark.parametrize("registered", [MyModel, REF])
def test_the_class_that_the_front_end_chose_is_built(registered):
    ModelRegistry.register_model("A", registered)
    assert resolve("A", "LlamaForCausalLM", config=chosen())[1] == "A"
    assert resolve("A", config=chosen(path="re.exported.elsewhere:MyModel"))[1] == "A"
    assert resolve("A", config=chosen(target="package:MyModel"))[1] == "A"


def test_another_class_than_the_front_ends_is_refused_with_both_owners():
    ModelRegistry.register_model("A", MyModel)
    other = chosen(target="other:Model", path="other:Model")
    with pytest.raises(
        ValueError, match=rf"A is {REF} in this process .* and other:Model in the front end \(somebody\)"
    ):
        resolve("A", config=other)


def test_no_other_architecture_takes_the_place_of_the_chosen_one():
    ModelRegistry.register_model("A", "no_such_package:Model")
    with pytest.raises(ValueError, match=r"\['A'\] failed to be inspected. A: .*no_such_package"):
        resolve("A", "LlamaForCausalLM", config=chosen(target="no_such_package:Model"))


def test_what_only_a_script_registered_is_taken_over_or_refused(said):
    assert resolve("A", config=chosen(by_plugin=False))[0].__name__ == "MyModel"
    assert any("A (" in line and "by somebody alone" in line for line in said("WARNING"))
    registry("models").unregister("A")
    with pytest.raises(ValueError, match="by the start script as __main__:Model, which another process cannot import"):
        resolve("A", config=chosen(target="__main__:Model", by_plugin=False))
    with pytest.raises(ValueError, match=r"the front end found model class A .*this process has no such class"):
        resolve("A", config=chosen())


def test_what_a_plugin_would_have_registered_is_named(monkeypatch):
    absent = ["plugin 'p' cannot be imported", "plugin 'q' is left out: not named in VLLM_PLUGINS"]
    monkeypatch.setattr("hardpoint.worker.models.registry.absent_plugins", lambda: absent)
    with pytest.raises(ValueError, match=r"not supported for now. Not loaded in this process: plugin 'p' .*; plugin"):
        resolve("Nope")


def test_registering_by_string_needs_no_torch():
    code = (
        "import sys; from hardpoint.worker.models.registry import ModelRegistry; "
        "ModelRegistry.register_model('A', 'a.b:C'); assert 'A' in ModelRegistry.get_supported_archs(); "
        "from hardpoint.worker.quantization.registry import QUANTIZATION_METHODS; "
        "from hardpoint.worker.attention.registry import register_backend; register_backend('X_ATTN', 'a.b.C'); "
        "assert 'gguf' in QUANTIZATION_METHODS; assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_all_classes_of_plugins_are_looked_at_and_what_is_wrong_is_noted():
    ModelRegistry.register_model("Good", MyModel)
    ModelRegistry.register_model("Gone", "no_such_package:Model")
    ModelRegistry.register_model("Half", f"{__name__}:Half")
    before = len(ledger.entries(key="models"))
    inspect_all()
    gone, half = ledger.entries(key="models")[before:]
    assert (gone.kind, gone.name, gone.detail) == (
        "fault",
        "Gone",
        "Gone: 'no_such_package:Model': there is no module 'no_such_package'",
    )
    assert gone.fix.startswith("check the spelling")
    assert (half.kind, half.name, half.fix) == ("warn", "Half", f"mend {__name__}:Half")
    assert half.detail.endswith("it lacks compute_logits(hidden_states)")


# What a class declares


@pytest.mark.parametrize("arch", BUILT_IN_MODEL_INFO)
def test_the_stated_facts_about_built_in_models_are_true(arch):
    assert inspect_model_class(registry("models").load(arch)) == BUILT_IN_MODEL_INFO[arch]


def test_facts_are_stated_for_every_built_in_model():
    built_in = {entry.name for entry in registry("models").entries() if entry.built_in}
    assert set(BUILT_IN_MODEL_INFO) == built_in


def test_inspection_reports_what_a_plugins_class_declares():
    ModelRegistry.register_model("A", MyModel)
    info, arch = ModelRegistry.inspect_model_cls(["A"], PLAIN)
    assert (info, arch) == (
        ModelInfo("MyModel", is_text_generation_model=True, supports_pp=True, supports_lora=True),
        "A",
    )
    assert ModelInfo.from_dict(info.to_dict()) == info
    with pytest.raises(ValueError, match="fields"):
        ModelInfo.from_dict({"architecture": "X"})
    with pytest.raises(ValueError, match="supports_pp"):
        ModelInfo.from_dict({**info.to_dict(), "supports_pp": "yes"})
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


class Half(Minimal):
    compute_logits = None


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


@pytest.mark.parametrize(
    ("members", "lacks"),
    [
        ({}, []),
        ({"embed_input_ids": None}, ["it lacks embed_input_ids(input_ids)"]),
        ({"forward": lambda self, ids: None}, ["it lacks the keyword arguments input_ids, positions of forward"]),
        ({"__init__": lambda self, config: None}, ["its constructor takes no vllm_config"]),
        ({"compute_logits": None}, ["it lacks compute_logits(hidden_states)"]),
        ({"compute_logits": None, "is_pooling_model": True}, []),
        ({"supports_pp": True}, ["it declares supports_pp but lacks make_empty_intermediate_tensors"]),
        ({"supports_lora": True}, ["it declares supports_lora but lacks packed_modules_mapping, embedding_modules"]),
    ],
)
def test_what_a_class_lacks_is_said_when_it_is_registered(members, lacks, said):
    made = variant(**members)
    assert remarks_on(made) == lacks
    ModelRegistry.register_model("A", made)
    assert [line.partition(": ")[2].partition(" [from")[0] for line in said("WARNING")] == lacks
    generates = "compute_logits" not in members and (not lacks or "declares" in lacks[0])
    assert ModelRegistry.is_text_generation_model("A", PLAIN) == generates


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
