"""Llama's arithmetic, held against transformers on random checkpoints."""

from __future__ import annotations

import random

import pytest
import torch

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "plain": {},
    "multi-head": {"num_key_value_heads": 4},
    "one shared head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 32},
    "odd vocabulary": {"vocab_size": 461},
    "theta": {"rope_theta": 500000.0},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN},
    "yarn with scale": {"rope_parameters": {**YARN, "beta_fast": 16, "attention_factor": 1.3, "truncate": False}},
    "window": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 20},
}


def reference_logits(folder, tokens):
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


@pytest.fixture(scope="module")
def tokens():
    return random.Random(3).choices(range(3, 448), k=150)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers(name, make_tiny_llama, paged_model, tokens):
    folder = make_tiny_llama(**VARIANTS[name])
    expected = reference_logits(folder, tokens)
    model = paged_model(folder)
    torch.testing.assert_close(model.whole(tokens), expected, atol=1e-4, rtol=1e-4)
    assert model.config.model_config.get_sliding_window() == VARIANTS[name].get("sliding_window")


def test_a_window_on_some_layers_only(make_tiny_llama, paged_model, tokens):
    kinds = ["sliding_attention", "full_attention"]
    folder = make_tiny_llama(sliding_window=20, layer_types=kinds)
    model = paged_model(folder)
    first, second = model.layers.values()
    assert (first.sliding_window, second.sliding_window) == (20, None)
    # The first layer's output at token 100 cannot depend on token 70, the second's may.
    changed = [*tokens[:70], (tokens[70] + 1) % 448, *tokens[71:]]
    assert not torch.allclose(model.whole(tokens)[100], model.whole(changed)[100], atol=1e-3)


@pytest.mark.parametrize("window", [None, 20])
def test_chunks_and_company_change_nothing(window, make_tiny_llama, paged_model):
    """Sequences computed in random pieces, in random company, on scattered blocks, give the logits of each alone."""
    pick = random.Random(5)
    kind = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    model = paged_model(make_tiny_llama(**(kind if window else {})), num_blocks=80)
    lengths = [1, 2, 15, 16, 17, 33, 64, 97, 130]
    texts = [pick.choices(range(3, 448), k=length) for length in lengths]
    alone = [model.whole(text) for text in texts]
    free = list(range(1, 80))
    pick.shuffle(free)
    blocks = [[free.pop() for _ in range(1 + len(text) // 16)] for text in texts]
    done = [0] * len(texts)
    found = [[] for _ in texts]
    while any(done[i] < len(text) for i, text in enumerate(texts)):
        going = [i for i, text in enumerate(texts) if done[i] < len(text) and pick.random() < 0.7]
        pick.shuffle(going)
        rows = []
        for i in going:
            count = pick.choice([1, 1, 5, 16, 60])
            rows.append((done[i], texts[i][done[i] : done[i] + count], blocks[i]))
        if not rows:
            continue
        for i, row, logits in zip(going, rows, model.logits(rows, padding=pick.choice([0, 3])), strict=True):
            found[i].append(logits)
            done[i] += len(row[1])
    for expected, parts in zip(alone, found, strict=True):
        torch.testing.assert_close(torch.cat(parts), expected, atol=2e-5, rtol=1e-4)


def test_embeddings_may_be_given_instead_of_ids(tiny_llama, paged_model, tokens):
    from hardpoint.worker.forward_context import set_forward_context

    model = paged_model(tiny_llama)
    expected = model.whole(tokens[:20])
    common = model.metadata([(0, tokens[:20], [1, 2])], 16)
    built = {name: builder.build(0, common) for name, builder in model.builders.items()}
    with torch.inference_mode(), set_forward_context(built, model.config):
        embeds = model.model.embed_input_ids(torch.tensor(tokens[:20]))
        hidden = model.model(None, torch.arange(20), inputs_embeds=embeds)
        torch.testing.assert_close(model.model.compute_logits(hidden), expected)


def test_half_precision_stays_close(tiny_llama, paged_model, tokens):
    exact = paged_model(tiny_llama).whole(tokens[:40]).softmax(-1)
    near = paged_model(tiny_llama, dtype="bfloat16").whole(tokens[:40])
    assert near.dtype == torch.bfloat16
    assert (near.float().softmax(-1) - exact).abs().max() < 0.2
    assert ((near.argmax(-1) == exact.argmax(-1)).float().mean()) > 0.8
