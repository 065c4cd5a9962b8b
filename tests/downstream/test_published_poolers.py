"""Published encoders and their IO processors, on tiny random checkpoints, held against their own arithmetic on the
states that transformers computes. The parts for ModernBERT import what the transformers of these tests no longer has.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from downstream_packages import folder_of

PLUGIN = "vllm-factory==0.2.1"

# A tiny DeBERTa of transformers, a word-level tokenizer that knows the special tokens, and both in a folder.
PREPARE = """
import json, sys, torch, transformers
from pathlib import Path
from safetensors.torch import save_file
from hardpoint import compat
assert compat.install()
place = Path(sys.argv[1])
torch.manual_seed(5)
sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
             max_position_embeddings=64, type_vocab_size=0, relative_attention=True, position_buckets=16,
             pos_att_type=["p2c", "c2p"], share_att_key=True, norm_rel_ebd="layer_norm", position_biased_input=False,
             max_relative_positions=-1, layer_norm_eps=1e-7, pad_token_id=0, hidden_act="gelu")
reference = transformers.DebertaV2Model(transformers.DebertaV2Config(**sizes)).eval()

def folder(model_type, architecture, weights, **more):
    facts = {"encoder_" + key: value for key, value in sizes.items() if key not in ("vocab_size",)}
    config = {"model_type": model_type, "architectures": [architecture], "vocab_size": 64, "hidden_size": 32,
              "num_hidden_layers": 0, "num_attention_heads": 1, "torch_dtype": "float32", **facts, **more}
    (place / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, place / "model.safetensors")

def states(ids):
    with torch.no_grad():
        return reference(torch.tensor([ids])).last_hidden_state[0]

def engine(**more):
    from vllm import LLM
    return LLM(str(place), max_model_len=64, dtype="float32", kv_cache_memory_bytes=8 << 20, **more)
"""

SPANS = """
from poolers.gliner import GLiNERSpanPooler
from plugins.deberta_gliner.model import GLiNERDebertaV2Config, _make_pooler_config
from vllm_factory.pooling.protocol import PoolerContext
gliner = dict(gliner_hidden_size=32, gliner_dropout=0.0, max_width=3, class_token_index=60, has_rnn=True)
pooler = GLiNERSpanPooler(_make_pooler_config(GLiNERDebertaV2Config(**gliner)))
backbone = {"token_rep_layer.bert_layer.model." + name: tensor for name, tensor in reference.state_dict().items()}
folder("gliner_deberta_v2", "GLiNERDebertaV2Model", {**backbone, **pooler.state_dict()}, **gliner)
from vllm import PoolingParams
ids = [1, 60, 7, 60, 8, 61, 20, 21, 22, 2]
asked = {"input_ids": ids, "words_mask": [0, 0, 0, 0, 0, 0, 1, 2, 3, 0], "text_lengths": 3, "attention_mask": [1] * 10}
llm = engine(skip_tokenizer_init=True)
[output] = llm.encode([{"prompt_token_ids": ids}], PoolingParams(task="plugin", extra_kwargs=asked), use_tqdm=False)
context = PoolerContext([len(ids)], [asked], ["plugin"], [torch.tensor(ids)])
[expected] = pooler(states(ids), context)
assert expected[:3].tolist() == [3, 3, 2] and expected.abs().max() > 0.01
torch.testing.assert_close(output.outputs.data, expected, atol=1e-4, rtol=1e-4)
"""

EXTRACTION = """
from poolers.gliner2 import GLiNER2Pooler
from plugins.deberta_gliner2.processor import SPECIAL_TOKENS, decode_output, format_results
from vllm_factory.pooling.protocol import PoolerContext
from tokenizers import Tokenizer, models, pre_tokenizers
words = "ada lovelace wrote notes in london person city ( ) , |".split()
names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *SPECIAL_TOKENS, *words]
names = list(dict.fromkeys(names))
tokenizer = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.add_special_tokens(names[: len(names) - len(words)])
tokenizer.save(str(place / "tokenizer.json"))
special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
(place / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}))
heads = dict(max_width=3, counting_layer="count_lstm", token_pooling="first")
pooler = GLiNER2Pooler(hidden_size=32, max_width=3, counting_layer="count_lstm").eval()
backbone = {"encoder." + name: tensor for name, tensor in reference.state_dict().items()}
folder("gliner2", "GLiNER2VLLMModel", {**backbone, **pooler.state_dict()}, **heads)
llm = engine(io_processor_plugin="deberta_gliner2_io")
data = {"text": "ada lovelace wrote notes in london", "labels": ["person", "city"], "threshold": 0.0,
        "include_confidence": True}
[answer] = llm.encode({"data": data}, use_tqdm=False)
from plugins.deberta_gliner2.io_processor import DeBERTaGLiNER2IOProcessor
own = DeBERTaGLiNER2IOProcessor(llm.llm_engine.vllm_config)
prompt = own.pre_process(own.parse_data(data), "r")
ids, params = prompt["prompt_token_ids"], own.merge_pooling_params()
with torch.no_grad():
    raw = pooler(states(ids), PoolerContext([len(ids)], [params.extra_kwargs], ["plugin"], [torch.tensor(ids)]))[0]
[expected] = [own.post_process([type("Output", (), {"outputs": type("Data", (), {"data": raw})})], "r")]
def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value
assert expected and rounded(answer.outputs) == rounded(expected), (answer.outputs, expected)
"""

DENSE = """
import sys
from hardpoint import compat
assert compat.install()
from vllm import LLM
llm = LLM(sys.argv[1], runner="pooling", io_processor_plugin="embeddinggemma_io", kv_cache_memory_bytes=8 << 20)
[answer] = llm.encode({"data": {"text": "a cat", "task": "STS"}}, use_tqdm=False)
[expected] = llm.embed(["task: sentence similarity | query: a cat"], use_tqdm=False)
assert max(abs(one - other) for one, other in zip(answer.outputs, expected.outputs.embedding, strict=True)) < 1e-5
try:
    llm.encode({"data": {"text": "a cat", "task": "unknown"}}, use_tqdm=False)
except ValueError as error:
    assert "Unknown task" in str(error)
else:
    raise AssertionError
"""


@pytest.mark.parametrize(
    ("part", "source"),
    [("deberta_gliner", PREPARE + SPANS), ("deberta_gliner2", PREPARE + EXTRACTION)],
    ids=["spans", "extraction"],
)
def test_a_published_encoder_answers_as_its_own_arithmetic(part, source, tmp_path):
    run(part, source, tmp_path)


def test_a_published_io_processor_runs_on_another_model(tiny_llama):
    # Its own model is not one by vLLM's rules: it has no embed_input_ids.
    run("embeddinggemma", DENSE, tiny_llama)


def run(part: str, source: str, place: Path) -> None:
    """Run source in a fresh interpreter with one part of the plugin; it gets a folder."""
    variables = {
        "PYTHONPATH": str(folder_of(PLUGIN)), "OMP_NUM_THREADS": "1", "VLLM_PLUGINS": f"{part},{part}_io",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", source, str(place)],
        env={**os.environ, **variables}, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
