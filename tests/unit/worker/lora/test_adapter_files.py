"""What is wrong with an adapter's files is told by file and remedy, and changes nothing that is loaded."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from paged_model import PagedModel
from safetensors.torch import load_file, save_file

from hardpoint.config.sections import LoRAConfig
from hardpoint.errors import ModelFileError
from hardpoint.types.lora_request import LoRARequest
from hardpoint.worker.lora.manager import AdapterManager
from hardpoint.worker.lora.reading import AdapterSettings, read_settings
from lora_adapters import write_adapter

Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = Q_A.replace("lora_A", "lora_B")


@pytest.fixture(scope="module")
def manager(tiny_llama) -> AdapterManager:
    model = PagedModel(tiny_llama)
    vars(model.config)["lora_config"] = LoRAConfig(max_lora_rank=8, target_modules=["q_proj", "down_proj", "k_proj"])
    return AdapterManager(model.model, model.config, torch.device("cpu"))


@pytest.fixture
def folder(tiny_llama, tmp_path) -> Path:
    return write_adapter(tiny_llama, tmp_path / "adapter")


def refusal(manager: AdapterManager, folder: Path) -> ModelFileError:
    with pytest.raises(ModelFileError) as caught:
        manager.add(LoRARequest("mine", 7, str(folder)))
    assert manager.ids() == set()
    assert not any(updates for _, method in manager._methods.values() for updates in method.updates.values())
    assert caught.value.fix
    assert "'mine'" in str(caught.value)
    return caught.value


def test_a_sound_adapter_is_loaded_once_and_dropped(manager, folder):
    request = LoRARequest("mine", 7, str(folder))
    assert manager.add(request)
    assert not manager.add(request)
    assert not manager.add(LoRARequest("mine", 7, str(folder), load_inplace=True))
    assert manager.ids() == {7}
    assert manager.remove(7)
    assert manager.ids() == set()


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "bias is 'all': trained biases"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": {"embed_tokens": [1]}}, "trainable_token_indices"),
        ({"target_parameters": ["experts.w1"]}, "target_parameters"),
        ({"alora_invocation_tokens": [1]}, "alora"),
        ({"peft_type": "LOHA"}, "only LORA"),
        ({"peft_type": None}, "only LORA"),
        ({"r": 0}, "r must be a rank"),
        ({"r": "4"}, "r must be a rank"),
        ({"r": True}, "r must be a rank"),
        ({"lora_alpha": "x"}, "lora_alpha must be a number"),
        ({"lora_alpha": math.inf}, "lora_alpha must be a number"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern"),
        ({"rank_pattern": [1]}, "rank_pattern must be an object"),
        ({"alpha_pattern": {"(": 1}}, "no regular expression"),
        ({"r": 16}, "rank 16 is more than max_lora_rank=8"),
        ({"rank_pattern": {"q_proj": 9}}, "--max-lora-rank 16"),
        ({"r": 8}, "the model and rank 8 want [8, 160]"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(manager, tiny_llama, tmp_path, facts, said):
    folder = write_adapter(tiny_llama, tmp_path / "adapter", **facts)
    assert said in str(refusal(manager, folder))


@pytest.mark.parametrize("text", ["", "{", "[]", '"text"', "[" * 100_000, "\ud800".encode("utf-8", "surrogatepass")])
def test_settings_that_are_no_settings_are_refused(manager, folder, text):
    file = folder / "adapter_config.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert "adapter_config.json" in str(refusal(manager, folder))


def test_settings_of_any_size_are_not_read(manager, folder):
    (folder / "adapter_config.json").write_bytes(b" " * (2 << 20))
    assert "larger than" in str(refusal(manager, folder))


def test_a_missing_folder_or_file_is_named(manager, folder):
    assert "adapter_config.json is not there" in str(refusal(manager, folder / "nowhere"))
    (folder / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors is not there" in str(refusal(manager, folder))


def test_pickled_weights_are_never_opened(manager, folder):
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").mkdir()  # Opening it as a file would raise something else.
    error = str(refusal(manager, folder))
    assert "adapter_model.bin is pickled" in error
    assert "safe_serialization=True" in error


@pytest.mark.parametrize("keep", [0, 4, 100, 2000])
def test_a_cut_file_is_refused(manager, folder, keep):
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "cut, damaged or not a safetensors file" in str(refusal(manager, folder))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.update({Q_A.replace("q_proj", "k_proj"): t.pop(Q_A)}), "has no lora_"),
        (lambda t: t.pop(Q_B), "has no lora_B"),
        (lambda t: t.update({Q_A: t[Q_A][:, :32].clone()}), "has the shape [4, 32]"),
        (lambda t: t.update({Q_B: t[Q_B][:32].clone()}), "has the shape [32, 4]"),
        (lambda t: t.update({Q_A: t[Q_A].to(torch.int8)}), "is I8"),
        (
            lambda t: t.update({"base_model.model.x.lora_magnitude_vector": t[Q_A].clone()}),
            "is no part of a LoRA adapter",
        ),
        (lambda t: t.update({"base_model.model.model.norm.weight": t[Q_A][0].clone()}), "not among the target modules"),
        (lambda t: t.clear(), "has no adapter weights"),
        (
            lambda t: t.update({n.replace("q_proj", "v_proj"): t[n].clone() for n in (Q_A, Q_B)}),
            "add v_proj to --lora-target-modules",
        ),
        (
            lambda t: t.update({n.replace("layers.0", "layers.9"): t[n].clone() for n in (Q_A, Q_B)}),
            "has no layer 'model.layers.9.self_attn.q_proj'",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(manager, folder, change, said):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    assert said in str(refusal(manager, folder))


def test_an_adapter_that_cannot_be_replaced_stays_as_it_was(manager, folder, tmp_path):
    manager.add(LoRARequest("mine", 7, str(folder)))
    layer = "model.layers.0.self_attn.qkv_proj"
    before = manager._methods[layer][1].updates["linear"][7]
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ModelFileError):
        manager.add(LoRARequest("mine", 7, str(broken), load_inplace=True))
    assert manager._methods[layer][1].updates["linear"][7] is before
    manager.remove(7)


def test_scales_and_ranks_follow_the_patterns(tiny_llama, tmp_path):
    patterns = {"rank_pattern": {"layers.0.self_attn.q_proj": 2, "down.*": 8}, "alpha_pattern": {"q_proj": 6}}
    write_adapter(tiny_llama, tmp_path, r=4, lora_alpha=8, **patterns)
    settings = read_settings("mine", tmp_path)
    names = [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.down_proj",
        "x.k",
    ]
    assert [settings.rank_of(name) for name in names] == [2, 4, 8, 4]
    assert [settings.scale_of(name) for name in names] == [3.0, 1.5, 1.0, 2.0]
    assert settings.largest_rank == 8
    assert AdapterSettings(4, 8.0, {}, {}, True).scale_of("x") == 4.0


def test_whole_embeddings_are_taken_for_the_models_own_only(tiny_llama, tmp_path):
    model = PagedModel(tiny_llama)
    vars(model.config)["lora_config"] = LoRAConfig()
    manager = AdapterManager(model.model, model.config, torch.device("cpu"))
    folder = write_adapter(tiny_llama, tmp_path)
    file, own = folder / "adapter_model.safetensors", load_file(Path(tiny_llama) / "model.safetensors")
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    tensors = {**load_file(file), name: own["model.embed_tokens.weight"]}
    save_file(tensors, file)
    assert manager.add(LoRARequest("mine", 1, str(folder)))
    save_file({**tensors, name: tensors[name] + 1}, file)
    with pytest.raises(ModelFileError, match="whole weights that are not the model's own"):
        manager.add(LoRARequest("other", 2, str(folder)))
    assert json.loads((folder / "adapter_config.json").read_text())["peft_type"] == "LORA"
