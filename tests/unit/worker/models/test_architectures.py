"""Each architecture's arithmetic, held against transformers on a tiny random checkpoint."""

from __future__ import annotations

import random

import pytest
import torch
from tiny_checkpoints import BASE, SMALL_GPT2, SMALL_OPT, build, logits_of, save

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA = {**BASE, "head_dim": 16, "query_pre_attn_scalar": 24}
WINDOWED = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
EXPERTS = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
VARIANTS = {
    "qwen2": ("Qwen2Config", BASE),
    "qwen2 tied, yarn": ("Qwen2Config", {**BASE, "tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2 with a window from a layer on": ("Qwen2Config", {**BASE, **WINDOWED}),
    "qwen3": ("Qwen3Config", {**BASE, "head_dim": 32}),
    "qwen3 with biases, llama3": (
        "Qwen3Config",
        {**BASE, "head_dim": 16, "attention_bias": True, "rope_parameters": LLAMA3},
    ),
    "mistral": ("MistralConfig", {**BASE, "sliding_window": 20, "head_dim": 16}),
    "gemma": ("GemmaConfig", {**BASE, "head_dim": 32}),
    "gemma2": ("Gemma2Config", {**GEMMA, "sliding_window": 20, "num_hidden_layers": 3}),
    "gemma2 capped tightly": (
        "Gemma2Config",
        {**GEMMA, "sliding_window": 20, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": ("Gemma3TextConfig", {**GEMMA, "sliding_window": 20, "num_hidden_layers": 7}),
    "gemma3 linear": (
        "Gemma3TextConfig",
        {
            **GEMMA,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "phi3": ("Phi3Config", {**BASE, "sliding_window": 30}),
    "phi3 turned in part": (
        "Phi3Config",
        {**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "mixtral": ("MixtralConfig", {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20}),
    "qwen3 with experts": ("Qwen3MoeConfig", {**BASE, **EXPERTS, "norm_topk_prob": True}),
    "qwen3 with experts in some layers": (
        "Qwen3MoeConfig",
        {**BASE, **EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ),
    "opt": ("OPTConfig", SMALL_OPT),
    "opt with norms behind and narrow embeddings": (
        "OPTConfig",
        {**SMALL_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32, "tie_word_embeddings": False},
    ),
    "gpt2": ("GPT2Config", SMALL_GPT2),
    "gpt2 scaled by layer": (
        "GPT2Config",
        {**SMALL_GPT2, "scale_attn_by_inverse_layer_idx": True, "n_inner": 80, "tie_word_embeddings": False},
    ),
}


@pytest.fixture(scope="module")
def tokens():
    return random.Random(3).choices(range(3, 320), k=100)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers(name, tmp_path, paged_model, tokens):
    reference = build(*VARIANTS[name])
    model = paged_model(save(reference, tmp_path))
    torch.testing.assert_close(model.whole(tokens), logits_of(reference, tokens), atol=1e-4, rtol=1e-4)
