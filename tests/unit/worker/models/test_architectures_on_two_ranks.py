"""Each architecture on two ranks, its layers split or shared out, held against transformers."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_ggufs
import torch
from tiny_checkpoints import BASE, SMALL_GPT2, SMALL_OPT, build, logits_of, save

from server_process import free_port

TOKENS = random.Random(4).choices(range(3, 320), k=40)
GEMMA = {**BASE, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 20}
EXPERTS = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
NARROW = {"word_embed_proj_dim": 32, "do_layer_norm_before": False}
MODELS = {
    "llama": ("LlamaConfig", BASE),
    "qwen2": ("Qwen2Config", {**BASE, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**BASE, "head_dim": 32, "num_key_value_heads": 1}),
    "mistral": ("MistralConfig", {**BASE, "sliding_window": 20, "head_dim": 16}),
    "gemma": ("GemmaConfig", {**BASE, "head_dim": 16}),
    "gemma2": ("Gemma2Config", GEMMA),
    "gemma3": ("Gemma3TextConfig", {**GEMMA, "layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": ("Phi3Config", {**BASE, "sliding_window": 30}),
    "opt": ("OPTConfig", SMALL_OPT),
    "opt with narrow embeddings": ("OPTConfig", {**SMALL_OPT, **NARROW}),
    "gpt2": ("GPT2Config", SMALL_GPT2),
    "mixtral": ("MixtralConfig", {**BASE, "num_local_experts": 4}),
    "qwen3 with experts": ("Qwen3MoeConfig", {**BASE, **EXPERTS}),
}
GGUFS = {
    "phi3.gguf": ("phi3", "Phi3Config", BASE),
    "gpt2.gguf": ("gpt2", "GPT2Config", SMALL_GPT2),
    "qwen3moe.gguf": ("qwen3moe", "Qwen3MoeConfig", {**BASE, **EXPERTS, "norm_topk_prob": True}),
}
# Run by the code of transformers, which is split by its own plan.
BY_TRANSFORMERS = {
    "granite": ("GraniteConfig", BASE),
    "olmo2": ("Olmo2Config", BASE),
}
SPLITS = ["tensor", "pipeline"]
CASES = [(name, split) for name in (*MODELS, *GGUFS) for split in SPLITS] + [
    (name, "tensor") for name in BY_TRANSFORMERS
]
HELPERS = str(Path(__file__).resolve().parent.parent)


@pytest.fixture(scope="module")
def logits(tmp_path_factory) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What transformers computes for each model, and what two ranks of ours do."""
    folder = tmp_path_factory.mktemp("two-ranks")
    expected, paths = {}, {}
    for name, (kind, settings) in {**MODELS, **BY_TRANSFORMERS}.items():
        model = build(kind, settings)
        expected[name], paths[name] = logits_of(model, TOKENS), save(model, folder / name)
    for name, (architecture, kind, settings) in GGUFS.items():
        model = build(kind, settings)
        expected[name] = logits_of(model, TOKENS)
        paths[name] = tiny_ggufs.write(model, architecture, folder / name)
    return expected, _computed({str(path): name for name, path in paths.items()}, folder / "found.pt")


def _computed(names: dict[str, str], out: Path) -> dict[str, torch.Tensor]:
    port = str(free_port())
    jobs = json.dumps(
        [[path, TOKENS, ["tensor"] if name in BY_TRANSFORMERS else SPLITS] for path, name in names.items()]
    )
    command = [sys.executable, str(Path(HELPERS, "rank_of_two.py"))]
    environment = {**os.environ, "PYTHONPATH": HELPERS, "OMP_NUM_THREADS": "1"}
    logs = [out.with_suffix(f".{rank}") for rank in range(2)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("w") as written:
            arguments = [*command, str(rank), port, jobs, str(out)]
            ranks.append(subprocess.Popen(arguments, env=environment, stdout=written, stderr=written))
    try:
        ended = [rank.wait(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ended == [0, 0], "\n".join(log.read_text() for log in logs)
    found = torch.load(out, weights_only=True)
    return {
        f"{split} {names[path]}": value for (split, _, path), value in ((k.partition(" "), v) for k, v in found.items())
    }


@pytest.mark.parametrize(("name", "split"), CASES)
def test_two_ranks_give_the_logits_of_transformers(name, split, logits):
    expected, found = logits
    torch.testing.assert_close(found[f"{split} {name}"], expected[name], atol=1e-4, rtol=1e-4)
