"""Each architecture's arithmetic, held against transformers on a tiny random checkpoint."""

from __future__ import annotations

import json
import random

import pytest
import torch
from tiny_checkpoints import BASE, SMALL_GPT2, SMALL_OPT, build, logits_of, save

from hardpoint.config.fallback import FALLBACK
from hardpoint.types.model_info import BUILT_IN_MODEL_INFO

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA = {**BASE, "head_dim": 16, "query_pre_attn_scalar": 24}
WINDOWED = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
EXPERTS = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
VARIANTS = {
    "llama": ("LlamaConfig", BASE),
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


def test_every_model_that_is_built_in_is_held_against_transformers():
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kinds = {getattr(transformers, config).model_type for config, _ in VARIANTS.values()}
    held = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] for kind in kinds}
    generating = {
        name
        for name, info in BUILT_IN_MODEL_INFO.items()
        if info.is_text_generation_model and not info.supports_multimodal
    }
    assert held == generating - {FALLBACK}


ONE_OF_EACH = (
    "qwen2 with a window from a layer on", "qwen3", "mistral", "gemma", "gemma2", "gemma3 linear", "phi3", "mixtral",
    "qwen3 with experts", "opt", "gpt2",
)  # fmt: skip


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_pieces_and_shared_prefixes_change_nothing(name, tmp_path, paged_model, tokens):
    model = paged_model(save(build(*VARIANTS[name]), tmp_path))
    blocks = [9, 3, 4, 1, 7, 2, 8]
    pieces = [(0, 37), (37, 38), (38, 39), (39, 100)]
    found = [model.logits([(start, tokens[start:end], blocks)])[0] for start, end in pieces]
    torch.testing.assert_close(torch.cat(found), model.whole(tokens), atol=2e-5, rtol=1e-4)
    # Another sequence, which begins with the same two blocks: they were filled anew by the one computed last.
    model.logits([(0, tokens, blocks)])
    other = [*tokens[:32], *tokens[60:90]]
    continued = model.logits([(32, other[32:], [9, 3, 20, 21])])[0]
    torch.testing.assert_close(continued, model.whole(other)[32:], atol=2e-5, rtol=1e-4)


def test_long_rope_goes_by_the_longest_context_that_is_served(tmp_path, paged_model, tokens):
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    }  # fmt: skip
    settings = {**BASE, "original_max_position_embeddings": 64, "rope_parameters": rope}
    reference = build("Phi3Config", settings)
    folder = save(reference, tmp_path)
    torch.testing.assert_close(paged_model(folder).whole(tokens), logits_of(reference, tokens), atol=1e-4, rtol=1e-4)
    short = paged_model(folder, max_model_len=64).whole(tokens[:60])
    torch.testing.assert_close(short, logits_of(build("Phi3Config", settings), tokens[:60]), atol=1e-4, rtol=1e-4)


def test_dynamic_rope_is_that_of_the_longest_context(tmp_path, paged_model, tokens):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    reference = build("Qwen2Config", {**BASE, "max_position_embeddings": 25, "rope_parameters": rope})
    model = paged_model(save(reference, tmp_path))
    assert model.config.model_config.max_model_len == len(tokens)
    torch.testing.assert_close(model.whole(tokens), logits_of(reference, tokens), atol=1e-4, rtol=1e-4)


def test_the_text_part_of_a_model_that_also_sees_is_served(tmp_path, paged_model, tokens):
    from safetensors.torch import load_file, save_file

    reference = build("Gemma3TextConfig", {**GEMMA, "sliding_window": 20})
    folder = save(reference, tmp_path)
    values = json.loads((folder / "config.json").read_text())
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": values}
    (folder / "config.json").write_text(json.dumps({**whole, "tie_word_embeddings": True}))
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["vision_tower.patches.weight"] = torch.zeros(4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = paged_model(folder)
    torch.testing.assert_close(model.whole(tokens), logits_of(reference, tokens), atol=1e-4, rtol=1e-4)
