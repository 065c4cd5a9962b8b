"""Models of the package transformers that are run by its code, through our attention."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from tiny_checkpoints import BASE, SMALL_GPT2, SMALL_OPT, build, logits_of, save

from hardpoint.config.engine_args import EngineArgs
from hardpoint.errors import ConfigError

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
# Models that have no class of ours.
OTHERS = {
    "granite": ("GraniteConfig", {**BASE, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "cohere": ("CohereConfig", {**BASE, "logit_scale": 0.25}),
    "gpt-neox": ("GPTNeoXConfig", {**BASE, "tie_word_embeddings": False}),
    "olmoe": ("OlmoeConfig", {**BASE, **EXPERTS}),
}
OURS = {
    "gemma2": ("Gemma2Config", {**BASE, "head_dim": 16, "sliding_window": 20, "attn_logit_softcapping": 5.0}),
    "gpt2": ("GPT2Config", SMALL_GPT2),
    "opt": ("OPTConfig", SMALL_OPT),
}


@pytest.fixture(scope="module")
def tokens():
    return random.Random(3).choices(range(3, 320), k=100)


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_we_do_not_have_runs(name, tmp_path, paged_model, tokens, caplog):
    reference = build(*OTHERS[name])
    folder = save(reference, tmp_path)
    with caplog.at_level(logging.WARNING, logger="hardpoint"):
        model = paged_model(folder)
    assert type(model.model).__name__ == "TransformersForCausalLM"
    assert type(reference).__name__ in caplog.text
    torch.testing.assert_close(model.whole(tokens), logits_of(reference, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", OURS)
def test_a_model_that_we_have_runs_so_when_asked(name, tmp_path, paged_model, tokens):
    reference = build(*OURS[name])
    model = paged_model(save(reference, tmp_path), model_impl="transformers")
    assert type(model.model).__name__ == "TransformersForCausalLM"
    torch.testing.assert_close(model.whole(tokens), logits_of(reference, tokens), atol=1e-4, rtol=1e-4)
    windows = [layer.sliding_window for layer in model.layers.values()]
    assert windows == ([20, None] if name == "gemma2" else [None, None])


def test_chunks_give_the_same(tmp_path, paged_model, tokens):
    model = paged_model(save(build(*OTHERS["granite"]), tmp_path))
    whole = model.whole(tokens)
    blocks = [9, 3, 4, 1, 7, 2, 8]
    found = [model.logits([(start, tokens[start:end], blocks)])[0] for start, end in ((0, 37), (37, 38), (38, 100))]
    torch.testing.assert_close(torch.cat(found), whole, atol=2e-5, rtol=1e-4)


def test_a_plugin_that_is_left_out_is_named_when_its_model_is_run_so(tmp_path, monkeypatch, caplog):
    left_out = ["plugin 'granites' is left out: VLLM_PLUGINS does not name it"]
    monkeypatch.setattr("hardpoint.config.fallback.absent_plugins", lambda: left_out)
    folder = save(build(*OTHERS["granite"]), tmp_path)
    with caplog.at_level(logging.WARNING, logger="hardpoint"):
        EngineArgs(model=str(folder), skip_tokenizer_init=True).create_engine_config()
    assert "GraniteForCausalLM has no implementation here" in caplog.text
    assert left_out[0] in caplog.text


def refused(folder, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        EngineArgs(model=str(folder), skip_tokenizer_init=True, **options).create_engine_config()
    return str(caught.value)


def test_what_cannot_be_had_is_refused(tmp_path, tiny_llama, make_tiny_llama, smollm2_gguf):
    folder = save(build(*OTHERS["granite"]), tmp_path)
    assert "not supported" in refused(folder, model_impl="vllm")
    unknown = make_tiny_llama(architectures=["NobodyKnowsForCausalLM"])
    assert "not supported" in refused(unknown)
    assert "no model NobodyKnowsForCausalLM" in refused(unknown, model_impl="transformers")
    assert "quantised" in refused(smollm2_gguf, model_impl="transformers")
    assert "Terratorch" in refused(tiny_llama, model_impl="terratorch")
