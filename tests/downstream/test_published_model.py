"""A published model as it is: spark2.5's attention in windows on three layers of four, with a gate on each head.

Its plugin also registers a parser and a config class, which wait (test_waiting_plugins); here the model alone is
registered, by the reference that its package names. What it says is held against a forward pass written out here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from downstream_packages import folder_of
from torch.nn import functional

SPARK = "vllm-spark2-5-plugin==0.1.0"
CONFIG: dict[str, Any] = {
    "architectures": ["Spark2_5ForCausalLM"], "model_type": "spark2_5", "torch_dtype": "float32",
    "vocab_size": 448, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "sliding_window": 24, "headwise_attn_output_gate": True, "tie_word_embeddings": False,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_theta": 5e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip
PROMPT = [3 + 5 * place % 440 for place in range(40)]
ANSWER = 24

SCRIPT = """
import json, sys
from hardpoint import compat
compat.install()
import vllm_spark2_5_plugin as plugin
from vllm import LLM, ModelRegistry, SamplingParams, TokensPrompt
ModelRegistry.register_model(plugin.ARCHITECTURE, plugin.MODEL_TARGET)
llm = LLM(sys.argv[1], max_num_batched_tokens=16, max_model_len=128, kv_cache_memory_bytes=16 << 20)
prompt = TokensPrompt(prompt_token_ids=json.loads(sys.argv[2]))
sampling = SamplingParams(temperature=0, max_tokens=int(sys.argv[3]), ignore_eos=True)
print(json.dumps(list(llm.generate(prompt, sampling, use_tqdm=False)[0].outputs[0].token_ids)))
"""


def test_spark_model_answers_as_its_forward_pass_written_out(tiny_llama, tmp_path):
    weights = checkpoint(tmp_path, tiny_llama)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), json.dumps(PROMPT), str(ANSWER)],
        env={
            "PYTHONPATH": str(folder_of(SPARK)),
            "OMP_NUM_THREADS": "1",
            "VLLM_PLUGINS": "",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        },
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tokens = list(PROMPT)
    for _ in range(ANSWER):
        tokens.append(int(logits(weights, tokens)[-1].argmax()))
    assert json.loads(done.stdout.splitlines()[-1]) == tokens[len(PROMPT) :]


def checkpoint(folder: Path, tiny_llama: Path) -> dict[str, torch.Tensor]:
    """Write random weights under the names the model is published with, and the tiny model's tokenizer."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(11)
    hidden, middle, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    heads, key_heads = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 1.5 / shape[-1] ** 0.5

    weights = {"model.embedding.weight": torch.randn(448, hidden, generator=generator)}
    for layer in range(CONFIG["num_hidden_layers"]):
        shapes = {
            "self_attn.q_k_v_proj": ((heads + 2 * key_heads) * head, hidden), "self_attn.g_proj": (heads, hidden),
            "self_attn.out_proj": (hidden, heads * head), "mlp.gate_proj": (middle, hidden),
            "mlp.up_proj": (middle, hidden), "mlp.down_proj": (hidden, middle),
        }  # fmt: skip
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = random(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = 1 + 0.1 * torch.randn(hidden, generator=generator)
    weights["model.norm.weight"] = 1 + 0.1 * torch.randn(hidden, generator=generator)
    weights["lm_head.weight"] = 2 * random(448, hidden)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for file in tiny_llama.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return weights


def logits(weights: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab]: everything computed anew."""
    x = weights["model.embedding.weight"][tokens]
    for layer, kind in enumerate(CONFIG["layer_types"]):
        own = {
            name.removeprefix(f"model.layers.{layer}.").removesuffix(".weight"): weight
            for name, weight in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        x = x + attention(own, norm(x, own["input_layernorm"]), kind)
        inner = norm(x, own["post_attention_layernorm"])
        gated = functional.gelu(inner @ own["mlp.gate_proj"].T) * (inner @ own["mlp.up_proj"].T)
        x = x + gated @ own["mlp.down_proj"].T
    return norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]).rsqrt() * weight


def attention(own: dict[str, torch.Tensor], x: torch.Tensor, kind: str) -> torch.Tensor:
    """[tokens, hidden], with causal scores inside the window of the layer's kind."""
    length, head = len(x), CONFIG["head_dim"]
    heads, key_heads = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
    joined = (x @ own["self_attn.q_k_v_proj"].T).view(length, heads + 2 * key_heads, head).transpose(0, 1)
    query, key, value = joined.split([heads, key_heads, key_heads])
    rope = CONFIG["rope_parameters"][kind]
    query, key = (turned(part, rope["rope_theta"], int(head * rope["partial_rotary_factor"])) for part in (query, key))
    key, value = (part.repeat_interleave(heads // key_heads, 0) for part in (key, value))
    distance = torch.arange(length)[:, None] - torch.arange(length)
    window = CONFIG["sliding_window"] if kind == "sliding_attention" else length
    seen = (distance >= 0) & (distance < window)
    scores = (query @ key.transpose(1, 2) / head**0.5).masked_fill(~seen, float("-inf"))
    gate = torch.sigmoid(x @ own["self_attn.g_proj"].T)
    mixed = (scores.softmax(-1) @ value).transpose(0, 1) * gate[..., None]
    return mixed.reshape(length, heads * head) @ own["self_attn.out_proj"].T


def turned(x: torch.Tensor, base: float, rotary_dim: int) -> torch.Tensor:
    """[heads, tokens, head] with the first `rotary_dim` elements turned, in pairs half of them apart."""
    angles = torch.arange(x.shape[1])[:, None] / base ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    first, second, rest = x.split([rotary_dim // 2, rotary_dim // 2, x.shape[-1] - rotary_dim], -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
