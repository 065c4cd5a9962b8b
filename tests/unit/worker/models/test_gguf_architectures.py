"""Each architecture from a GGUF file, held against transformers on the model that was written into it."""

from __future__ import annotations

import random

import gguf
import pytest
import tiny_ggufs
import torch
from tiny_checkpoints import BASE, SMALL_GPT2, build, logits_of

from hardpoint.config.gguf_facts import KINDS
from hardpoint.worker.loaders.gguf_names import TENSOR_NAMES

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7], "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
}  # fmt: skip
GEMMA = {**BASE, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 20}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
VARIANTS = {
    "llama": ("llama", "LlamaConfig", BASE),
    "llama with experts": ("llama", "MixtralConfig", {**BASE, "num_local_experts": 4}),
    "qwen2": ("qwen2", "Qwen2Config", {**BASE, "rope_parameters": YARN}),
    "qwen3": ("qwen3", "Qwen3Config", {**BASE, "head_dim": 32, "tie_word_embeddings": True}),
    "qwen3moe": ("qwen3moe", "Qwen3MoeConfig", {**BASE, **EXPERTS, "head_dim": 16}),
    "gemma": ("gemma", "GemmaConfig", {**BASE, "head_dim": 32}),
    "gemma2": ("gemma2", "Gemma2Config", {**GEMMA, "num_hidden_layers": 3}),
    "gemma3": ("gemma3", "Gemma3TextConfig", {**GEMMA, "num_hidden_layers": 7}),
    "phi3": ("phi3", "Phi3Config", {**BASE, "sliding_window": 30}),
    "phi3 long": ("phi3", "Phi3Config", {**BASE, "original_max_position_embeddings": 64, "rope_parameters": LONG}),
    "gpt2": ("gpt2", "GPT2Config", SMALL_GPT2),
}


@pytest.fixture(scope="module")
def tokens():
    return random.Random(3).choices(range(3, 320), k=100)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers(name, tmp_path, paged_model, tokens):
    architecture, kind, settings = VARIANTS[name]
    reference = build(kind, settings)
    path = tiny_ggufs.write(reference, architecture, tmp_path / "tiny.gguf")
    model = paged_model(path)
    torch.testing.assert_close(model.whole(tokens), logits_of(reference, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama with experts", "qwen3moe", "gemma3", "phi3", "gpt2"])
def test_the_kernels_compute_with_the_stored_weights(name, tmp_path, paged_model, tokens):
    architecture, kind, settings = VARIANTS[name]
    path = tiny_ggufs.write(build(kind, settings), architecture, tmp_path / "tiny.gguf", "Q8_0")
    exact, quick = paged_model(path).whole(tokens), paged_model(path, dtype="auto")
    packed = [parameter for parameter in quick.model.parameters() if type(parameter).__name__ == "PackedWeight"]
    assert packed, "nothing stayed quantised"
    # Activations are rounded to int8 block by block.
    assert (quick.whole(tokens) - exact).abs().max() < 0.12 * exact.abs().max()


@pytest.mark.parametrize("name", ["llama with experts", "qwen3moe"])
def test_company_does_not_change_which_experts_are_chosen(name, tmp_path, paged_model, tokens):
    architecture, kind, settings = VARIANTS[name]
    path = tiny_ggufs.write(build(kind, settings), architecture, tmp_path / "tiny.gguf", "Q8_0")
    model = paged_model(path, dtype="auto")
    alone = model.whole(tokens[:40])
    first, _ = model.logits([(0, tokens[:40], [1, 2, 3]), (0, tokens[40:], [4, 5, 6, 7])])
    assert torch.equal(first, alone)


@pytest.mark.parametrize("architecture", KINDS)
def test_names_cover_those_of_the_gguf_package(architecture):
    """Every tensor that llama.cpp may have in such a model has a place in ours."""
    key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    unused = {"attn_rot_embd"}
    split = {"attn_q", "attn_k", "attn_v"} if architecture == "phi3" else set()
    experts = {name for name in ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")}
    for tensor in gguf.MODEL_TENSORS[key]:
        name = gguf.TENSOR_NAMES[tensor].format(bid=3)
        if name.split(".")[-1] in unused | split | (experts if architecture == "llama" else set()):
            continue
        names = TENSOR_NAMES[architecture]
        assert f"{name}.weight" in names.skipped or names.model_names(f"{name}.weight"), name
