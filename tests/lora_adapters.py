"""LoRA adapters for tests: folders as PEFT writes them, and what PEFT computes with them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ATTENTION = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj", "gate_proj"]}
EVERY_LAYER = {
    "r": 8, "lora_alpha": 8, "use_rslora": True, "rank_pattern": {"o_proj": 2}, "alpha_pattern": {"k_proj": 32},
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}  # fmt: skip
VOCABULARY = {"r": 4, "lora_alpha": 4, "target_modules": ["embed_tokens", "lm_head", "up_proj"]}
KINDS = {"attention": ATTENTION, "every": EVERY_LAYER, "vocabulary": VOCABULARY}


def load_base(model: Path) -> Any:
    """The model as transformers has it, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def with_adapter(model: Path, folder: Path, settings: dict[str, Any], seed: int = 0) -> Any:
    """Make a random adapter, save it in `folder` and return PEFT's model with it."""
    # PEFT and transformers warn about each other.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft

        made = peft.get_peft_model(load_base(model), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
        torch.manual_seed(seed)
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        made.save_pretrained(folder)
    return made.eval()


@torch.inference_mode()
def logits_of(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab] logits."""
    return model(torch.tensor([list(tokens)])).logits[0]


def write_adapter(model: Path, folder: Path, seed: int = 0, rank: int = 4, std: float = 0.1, **facts: Any) -> Path:
    """Write a random adapter of the q and down projections of a tiny Llama without PEFT, which is slow to import.

    facts  more for adapter_config.json, or other values
    """
    config = json.loads((model / "config.json").read_text())
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, inputs, outputs in (("self_attn.q_proj", hidden, query), ("mlp.down_proj", middle, hidden)):
            prefix = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * std
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * std
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 4 * rank, "bias": "none", "base_model_name_or_path": str(model),
        "target_modules": ["q_proj", "down_proj"], **facts,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
