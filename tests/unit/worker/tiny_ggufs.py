"""GGUF files of tiny random models, written as llama.cpp's converter writes them, names by the package `gguf`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch


def write(model: Any, architecture: str, path: Path, kind: str = "F32") -> Path:
    """Write a model of transformers as a GGUF file of an architecture of llama.cpp; matrices are stored as `kind`."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    _metadata(writer, config, architecture)
    tensors = dict(model.state_dict())
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    layers = config.num_hidden_layers
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, layers)
    for name, tensor in _converted(tensors, config, architecture):
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        _add(writer, stored, tensor, kind)
    for name, numbers in _rope_factors(config, architecture):
        writer.add_tensor(name, np.asarray(numbers, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, kind: str) -> None:
    numbers = np.ascontiguousarray(tensor.detach().numpy().astype(np.float32))
    if kind == "F32" or tensor.dim() == 1 or "ffn_gate_inp" in name:
        writer.add_tensor(name, numbers)
        return
    chosen = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(numbers, chosen), raw_dtype=chosen)


def _metadata(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    heads = config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    writer.add_head_count(heads)
    writer.add_vocab_size(config.vocab_size)
    if architecture == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if architecture not in ("phi3", "llama"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(max(1.0, float(np.sqrt(1 + np.log(scale) / np.log(original)))))
        writer.add_rope_scaling_orig_ctx_len(original)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if architecture != "llama":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _converted(tensors: dict[str, torch.Tensor], config: Any, architecture: str) -> Any:
    """The tensors as the converter changes them, still under Hugging Face's names."""
    for name, tensor in tensors.items():
        if architecture == "gpt2":
            turned = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
            yield name, tensor.t() if turned else tensor
        elif architecture.startswith("gemma") and name.endswith("norm.weight"):
            yield name, tensor + 1
        elif architecture == "llama" and ".q_proj." in name:
            yield name, _turned(tensor, config.num_attention_heads)
        elif architecture == "llama" and ".k_proj." in name:
            yield name, _turned(tensor, config.num_key_value_heads)
        elif name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            base, words = name.removesuffix("gate_up_proj"), ("gate_proj", "up_proj")
            yield f"{base}{words[0]}.weight", gate
            yield f"{base}{words[1]}.weight", up
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", tensor
        else:
            yield name, tensor


def _turned(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def _rope_factors(config: Any, architecture: str) -> Any:
    if architecture == "phi3" and config.rope_parameters["rope_type"] == "longrope":
        yield "rope_factors_long.weight", config.rope_parameters["long_factor"]
        yield "rope_factors_short.weight", config.rope_parameters["short_factor"]
