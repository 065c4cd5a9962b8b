"""Tiny random checkpoints of every architecture, made with transformers, and the logits it computes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

BASE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": None, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
SMALL_GPT2 = {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
SMALL_OPT = {
    "vocab_size": 320, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256, "word_embed_proj_dim": 64,
}  # fmt: skip


def build(kind: str, settings: dict[str, Any]) -> Any:
    """A random model of transformers, lively enough that logits differ; the same every time."""
    import transformers

    config = getattr(transformers, kind)(**settings)
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            fan = parameter.shape[-2] if "gpt2" in kind.lower() and "weight" in name else parameter.shape[-1]
            parameter.data = noise * (1.0 if "embed" in name or "wte" in name else 1.2 / fan**0.5)
        elif name.endswith("bias"):
            parameter.data = 0.3 * noise
        else:
            parameter.data += 0.2 * noise
    return model.eval()


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocabulary]."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def save(model: Any, folder: Path) -> Path:
    """Write a model as safetensors with its config.json."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    return folder
