from __future__ import annotations

from typing import Any

import pytest
from tiny_checkpoints import BASE, SMALL_GPT2, SMALL_OPT, build, save

from hardpoint.extensions.registry import registry
from hardpoint.testing import check_model
from hardpoint.types.model_info import BUILT_IN_MODEL_INFO
from tiny_llava import write_tiny_llava

HEADS = {**BASE, "head_dim": 16}
GEMMA = {**HEADS, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
# What each class is given to load.
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", BASE),
    "MistralForCausalLM": ("MistralConfig", {**HEADS, "sliding_window": 20}),
    "Qwen2ForCausalLM": ("Qwen2Config", BASE),
    "Qwen3ForCausalLM": ("Qwen3Config", HEADS),
    "GemmaForCausalLM": ("GemmaConfig", HEADS),
    "Gemma2ForCausalLM": ("Gemma2Config", GEMMA),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", GEMMA),
    "Phi3ForCausalLM": ("Phi3Config", BASE),
    "OPTForCausalLM": ("OPTConfig", SMALL_OPT),
    "GPT2LMHeadModel": ("GPT2Config", SMALL_GPT2),
    "MixtralForCausalLM": ("MixtralConfig", {**BASE, "num_local_experts": 4}),
    "Qwen3MoeForCausalLM": (
        "Qwen3MoeConfig",
        {**HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "TransformersForCausalLM": ("GraniteConfig", BASE),
}


GENERATING = [
    name for name, info in BUILT_IN_MODEL_INFO.items() if info.is_text_generation_model and not info.supports_multimodal
]


@pytest.mark.parametrize("name", GENERATING)
def test_built_in_models(name, tmp_path):
    folder = save(build(*CHECKPOINTS[name]), tmp_path)
    check_model(registry("models").load(name), folder, skip_tokenizer_init=True)


def test_a_built_in_model_that_takes_media(tmp_path):
    write_tiny_llava(tmp_path)
    check_model(registry("models").load("LlavaForConditionalGeneration"), tmp_path, skip_tokenizer_init=True)
