"""Adapters of every linear layer of other architectures than Llama, held against PEFT."""

from __future__ import annotations

import pytest
import torch
from adapted_model import TOKENS, logits, manager_of
from paged_model import PagedModel
from tiny_checkpoints import BASE, SMALL_OPT, build, save

from hardpoint.config.engine_args import EngineArgs
from hardpoint.config.wire import from_wire, to_wire
from hardpoint.errors import ConfigError
from lora_adapters import logits_of, with_adapter

GEMMA = {**BASE, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 20}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MODELS = {
    "qwen2": ("Qwen2Config", {**BASE, "tie_word_embeddings": True}, "all-linear"),
    "qwen3": ("Qwen3Config", {**BASE, "head_dim": 32, "num_key_value_heads": 1}, "all-linear"),
    "gemma2": ("Gemma2Config", GEMMA, "all-linear"),
    "gemma3": ("Gemma3TextConfig", {**GEMMA, "layer_types": ["sliding_attention", "full_attention"]}, "all-linear"),
    "phi3": ("Phi3Config", {**BASE, "sliding_window": 30}, "all-linear"),
    "opt": ("OPTConfig", SMALL_OPT, "all-linear"),
    "mixtral": ("MixtralConfig", {**BASE, "num_local_experts": 4}, ATTENTION),
}


@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_of_every_linear_layer(name, tmp_path):
    kind, settings, modules = MODELS[name]
    path = save(build(kind, settings), tmp_path / "m")
    reference = with_adapter(path, tmp_path / "a", {"r": 4, "lora_alpha": 4, "target_modules": modules})
    model = PagedModel(path)
    manager = manager_of(model, tmp_path, ["a"])
    (found,) = logits(model, manager, [1])
    torch.testing.assert_close(found, logits_of(reference, TOKENS), atol=1e-4, rtol=1e-4)


def test_a_model_run_by_transformers_has_none(tmp_path):
    path = save(build("GraniteConfig", BASE), tmp_path / "m")
    with pytest.raises(ConfigError, match="TransformersForCausalLM does not support LoRA adapters"):
        EngineArgs(model=str(path), skip_tokenizer_init=True, enable_lora=True).create_engine_config()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_loras": 2}, "--max-loras says nothing without --enable-lora"),
        ({"lora_target_modules": ["q_proj"]}, "--lora-target-modules says nothing"),
        ({"enable_lora": True, "max_loras": 3, "max_cpu_loras": 2}, "max_cpu_loras=2 is less than max_loras=3"),
        ({"enable_lora": True, "max_lora_rank": 7}, "max_lora_rank"),
        ({"enable_lora": True, "max_loras": 0}, "max_loras"),
        ({"enable_lora": True, "lora_dtype": "float8"}, "expected one of auto, float16, bfloat16"),
        ({"enable_lora": True, "fully_sharded_loras": True}, "sharding both is not supported"),
        ({"enable_lora": True, "default_mm_loras": {"image": "x"}}, "media towers"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tiny_llama, options, said):
    with pytest.raises(ConfigError, match=said):
        EngineArgs(model=str(tiny_llama), **options).create_engine_config()


def test_settings_are_completed(tiny_llama):
    config = EngineArgs(model=str(tiny_llama), enable_lora=True, max_loras=3, lora_dtype=torch.bfloat16)
    settled = from_wire(to_wire(config.create_engine_config())).lora_config
    assert (settled.max_loras, settled.max_cpu_loras, settled.lora_dtype) == (3, 3, "bfloat16")
