"""A tiny random Llama with a tokenizer, written without a network and without transformers; the same every time."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# What the tiny model's tokenizer learns its merges from.
CORPUS = [
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.",
    "A server answers requests; a request has a prompt, and a prompt has tokens.",
    "Once upon a time there was a small model that knew nothing and said so at length.",
    "for number in range(10):\n    print(number, number * number)\n",
    "Grüße aus Köln, naïve café, 東京 and Москва: 1234567890.",
] * 4

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END_ID = 2

TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 448,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": END_ID,
    "torch_dtype": "float32",
}


@cache
def tiny_model() -> Path:
    """The folder of a tiny random Llama; made once per process, gone when that ends."""
    folder = Path(tempfile.mkdtemp(prefix="hardpoint-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_tiny_llama(folder / "tiny-llama")
    return folder / "tiny-llama"


def write_tiny_llama(folder: Path, **changes: Any) -> None:
    """Write a random Llama with a tokenizer; keywords change its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**TINY_LLAMA, **changes}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": END_ID})
    _write_weights(folder / "model.safetensors", config)
    _write_tokenizer(folder, config["vocab_size"])


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")


def _write_weights(path: Path, config: dict[str, Any]) -> None:
    save_file(llama_tensors(config), path, metadata={"format": "pt"})


def llama_tensors(config: dict[str, Any], seed: int = 7) -> dict[str, Any]:
    """Random weights under Hugging Face's names, lively enough that the next token is rarely a close call."""
    generator = torch.Generator().manual_seed(seed)
    hidden, middle, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (1.5 / shape[-1] ** 0.5)

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(hidden, generator=generator)

    tensors = {"model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden, generator=generator)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        sizes = {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (middle, hidden),
            "mlp.up_proj": (middle, hidden),
            "mlp.down_proj": (hidden, middle),
        }
        for name, shape in sizes.items():
            tensors[f"{prefix}{name}.weight"] = random(*shape)
            if config["attention_bias" if "attn" in name else "mlp_bias"]:
                tensors[f"{prefix}{name}.bias"] = 0.5 * torch.randn(shape[0], generator=generator)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = norm()
    tensors["model.norm.weight"] = norm()
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = random(config["vocab_size"], hidden) * 2
    return tensors


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": TINY_LLAMA["max_position_embeddings"],
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)
