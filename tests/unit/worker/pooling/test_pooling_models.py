"""Pooling models in whole engines, held against transformers on tiny random checkpoints."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import BASE

from hardpoint import LLM, PoolingParams
from hardpoint.errors import ConfigError

BERT = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 96, "type_vocab_size": 2,
}  # fmt: skip
LONG, SHORT = random.Random(4).choices(range(3, 300), k=70), [5, 9, 200]
PROMPTS = [{"prompt_token_ids": ids} for ids in (LONG, SHORT, LONG[:40])]
IDS = [prompt["prompt_token_ids"] for prompt in PROMPTS]
Save = Callable[..., tuple[Any, Path]]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Save a random model of transformers: `save("BertModel", "BertConfig", {...})` gives it and its folder."""
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()

    def make(kind: str, config: str, settings: dict[str, Any]) -> tuple[Any, Path]:
        torch.manual_seed(7)
        model = getattr(transformers, kind)(getattr(transformers, config)(**settings)).eval()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape)
        model.save_pretrained(tmp_path)
        return model, tmp_path

    return make


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

    def make(folder: Path, **settings: Any) -> LLM:
        return LLM(
            str(folder), dtype="float32", skip_tokenizer_init=True, kv_cache_memory_bytes=8 << 20,
            **{"max_num_seqs": 4, **settings},
        )  # fmt: skip

    return make


def states(model: Any, ids: list[int], **named: Any) -> np.ndarray:
    """The last layer's states [tokens, hidden] by transformers."""
    with torch.no_grad():
        return model(torch.tensor([ids]), **named).last_hidden_state[0].numpy()


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector, axis=-1, keepdims=True)


def embeddings(llm: LLM, prompts: list[Any] = PROMPTS, **params: Any) -> list[np.ndarray]:
    outputs = llm.embed(prompts, use_tqdm=False, pooling_params=PoolingParams(**params))
    return [np.array(output.outputs.embedding) for output in outputs]


def close(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "config", "more"),
    [
        ("LlamaModel", "LlamaConfig", {}),
        ("Qwen2Model", "Qwen2Config", {}),
        ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 16}),
    ],
)
def test_a_decoder_embeds_with_its_last_token(save, start, kind, config, more):
    model, folder = save(kind, config, {**BASE, **more})
    # A step takes 32 tokens: the long prompts are computed in pieces, and found in the cache the second time.
    llm = start(folder, runner="pooling", max_num_batched_tokens=32, block_size=16)
    inner = getattr(model, "model", model)
    expected = [unit(states(inner, ids)[-1]) for ids in IDS]
    assert llm.supported_tasks == ("embed", "token_embed")
    close(embeddings(llm), expected)
    again = llm.embed(PROMPTS, use_tqdm=False)
    close([output.outputs.embedding for output in again], expected)
    assert [output.num_cached_tokens for output in again] == [64, 0, 32]
    tokens = llm.encode(PROMPTS, use_tqdm=False, pooling_task="token_embed")
    close([output.outputs.data for output in tokens], [unit(states(inner, ids)) for ids in IDS])
    assert not any(output.num_cached_tokens for output in tokens)
    with pytest.raises(ValueError, match="does not support classify, only embed, token_embed"):
        llm.classify(PROMPTS)


def test_pooling_settings_win_and_dimensions_cut(save, start):
    model, folder = save("LlamaForCausalLM", "LlamaConfig", BASE)
    llm = start(
        folder, convert="embed", hf_overrides={"matryoshka_dimensions": [16, 32]}, max_num_batched_tokens=32,
        pooler_config={"pooling_type": "MEAN", "use_activation": False},
    )  # fmt: skip
    means = [states(model.model, ids).mean(axis=0) for ids in IDS]
    close(embeddings(llm), means)
    close(embeddings(llm, dimensions=16, use_activation=True), [unit(mean[:16]) for mean in means])
    with pytest.raises(ValueError, match="dimensions must be one of 16, 32, got 8"):
        embeddings(llm, dimensions=8)
    with pytest.raises(ValueError, match="the model pools and does not generate"):
        llm.generate(PROMPTS[1], use_tqdm=False)


@pytest.mark.parametrize(
    ("kind", "config"),
    [("BertModel", "BertConfig"), ("RobertaModel", "RobertaConfig"), ("XLMRobertaModel", "XLMRobertaConfig")],
)
def test_an_encoder_embeds_with_its_first_token(save, start, kind, config):
    model, folder = save(kind, config, {**BERT, "pad_token_id": 1} if "Rob" in kind else BERT)
    llm = start(folder)
    close(embeddings(llm), [unit(states(model, ids)[0]) for ids in IDS])
    assert not llm.llm_engine.vllm_config.scheduler_config.enable_chunked_prefill
    assert llm.model_config.max_model_len == (94 if "Rob" in kind else 96)
    with pytest.raises(ValueError, match="too long"):
        embeddings(llm, [{"prompt_token_ids": [5] * 97}])


@pytest.mark.parametrize(
    ("kind", "config", "settings"),
    [
        ("BertForSequenceClassification", "BertConfig", {**BERT, "num_labels": 3}),
        ("RobertaForSequenceClassification", "RobertaConfig", {**BERT, "pad_token_id": 1, "num_labels": 3}),
        ("XLMRobertaForSequenceClassification", "XLMRobertaConfig", {**BERT, "pad_token_id": 1, "num_labels": 3}),
        ("LlamaForSequenceClassification", "LlamaConfig", {**BASE, "num_labels": 3, "pad_token_id": 2}),
        ("Qwen3ForSequenceClassification", "Qwen3Config", {**BASE, "head_dim": 16, "num_labels": 3, "pad_token_id": 2}),
    ],
)
def test_sequences_are_classified(save, start, kind, config, settings):
    model, folder = save(kind, config, settings)
    llm = start(folder)
    assert set(llm.supported_tasks) == {"classify", "token_classify"}
    with torch.no_grad():
        logits = [model(torch.tensor([ids])).logits[0] for ids in IDS]
    probs = [one.softmax(-1).numpy() for one in logits]
    close([output.outputs.probs for output in llm.classify(PROMPTS, use_tqdm=False)], probs)
    plain = llm.classify(PROMPTS, use_tqdm=False, pooling_params=PoolingParams(use_activation=False))
    close([output.outputs.probs for output in plain], [one.numpy() for one in logits])


def test_segments_reach_the_model(save, start):
    model, folder = save("BertForSequenceClassification", "BertConfig", {**BERT, "num_labels": 1})
    llm = start(folder)
    params = [PoolingParams(extra_kwargs={"compressed_token_type_ids": at}) for at in (30, 1)] + [PoolingParams()]
    found = llm.classify(PROMPTS, pooling_params=params, use_tqdm=False)
    types = [[0] * at + [1] * (len(ids) - at) for ids, at in zip(IDS, (30, 1, 40), strict=True)]
    with torch.no_grad():
        expected = [
            torch.sigmoid(model(torch.tensor([ids]), token_type_ids=torch.tensor([kinds])).logits[0]).numpy()
            for ids, kinds in zip(IDS, types, strict=True)
        ]
    close([output.outputs.probs for output in found], expected)


def test_files_of_sentence_transformers_say_how_to_pool(save, start):
    from safetensors.torch import save_file

    model, folder = save("BertModel", "BertConfig", BERT)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense")]
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 80}')
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (folder / "2_Dense").mkdir()
    dense = {"in_features": 64, "out_features": 12, "bias": True}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(dense))
    torch.manual_seed(1)
    weight, bias = torch.randn(12, 64), torch.randn(12)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    llm = start(folder)
    expected = [np.tanh(states(model, ids).mean(axis=0) @ weight.numpy().T + bias.numpy()) for ids in IDS]
    close(embeddings(llm), expected)
    assert llm.model_config.max_model_len == 80


def test_what_a_model_cannot_do_is_refused_before_it_is_loaded(save, start):
    _, folder = save("BertModel", "BertConfig", BERT)
    with pytest.raises(ConfigError, match=r"does not support --runner generate.*pooling model: leave --runner out"):
        start(folder, runner="generate")
    with pytest.raises(ConfigError, match="--convert classify makes a pooling model"):
        start(folder, runner="generate", convert="classify")


def test_a_plugin_pooler_that_raises_ends_its_own_request(save, start, monkeypatch):
    from hardpoint.worker.pooling.methods import LastPool

    right = LastPool.forward

    def wrong(self: LastPool, hidden_states: torch.Tensor, pooling_metadata: Any) -> torch.Tensor:
        if 3 in pooling_metadata.prompt_lens:
            raise RuntimeError("not three")
        return right(self, hidden_states, pooling_metadata)

    model, folder = save("LlamaModel", "LlamaConfig", BASE)
    llm = start(folder)
    monkeypatch.setattr(LastPool, "forward", wrong)
    outputs = llm.encode(PROMPTS, use_tqdm=False)
    assert [output.error is None for output in outputs] == [True, False, True]
    assert "not three" in outputs[1].error.message
    close([outputs[0].outputs.data, outputs[2].outputs.data], [unit(states(model, ids)[-1]) for ids in IDS[::2]])
