"""Model facts of a GGUF file under Hugging Face's names."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hardpoint.config.gguf_file import GGMLType, GGUFFile
from hardpoint.errors import ModelFileError

# GGUF architecture -> class name of the model that runs it.
ARCHITECTURES = {"llama": "LlamaForCausalLM"}

# Llama 3's rope is stored as a tensor of divisors; these are the constants that all its sizes share.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_ROPE_TENSOR = "rope_freqs.weight"
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def facts_of(file: GGUFFile) -> dict[str, Any]:
    """Return what config.json would state. Raises `ModelFileError` naming the key or tensor that is wrong."""
    architecture = _architecture(file)
    read = _Reader(file, architecture)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise _bad(file, "it has no tensor 'token_embd.weight' of two dimensions")
    heads = read.count("attention.head_count")
    hidden = read.count("embedding_length")
    head_dim = read.optional_count("attention.key_length") or hidden // heads
    facts = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": read.count("feed_forward_length"),
        "num_hidden_layers": read.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read.optional_count("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": read.count("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        **_token_ids(file),
        **_rope(file, read, head_dim),
    }
    if read.optional_count("attention.value_length") not in (None, head_dim):
        raise _bad(file, "its value heads differ in size from its key heads, which is not supported")
    return facts


def generation_of(file: GGUFFile) -> dict[str, Any]:
    """Return what generation_config.json would state: end tokens and the sampling defaults in the file."""
    found = {name: file.metadata[key] for key, name in _SAMPLING.items() if key in file.metadata}
    ends = [file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ids = list(dict.fromkeys(end for end in ends if isinstance(end, int)))
    return {**found, "eos_token_id": ids} if ids else found


def _architecture(file: GGUFFile) -> str:
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise _bad(file, f"it holds a {kind}, not a model")
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelFileError(
            f"{file.path}: models of the GGUF architecture {architecture!r} are not supported",
            code="model-architecture",
            fix=f"supported as GGUF: {', '.join(ARCHITECTURES)}",
        )
    if file.metadata.get(f"{architecture}.expert_count"):
        raise ModelFileError(
            f"{file.path}: {architecture} models with experts are not supported", code="model-architecture"
        )
    return architecture


class _Reader:
    """Metadata of one architecture, held against what a model can be."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._file = file
        self._prefix = architecture + "."

    def raw(self, name: str) -> Any:
        value = self._file.metadata.get(self._prefix + name)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            # A value per layer; only models whose layers are alike are supported.
            return value[0]
        return value

    def optional_count(self, name: str) -> int | None:
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise _bad(self._file, f"metadata {self._prefix + name!r} is {_short(value)}, expected one positive number")
        return value

    def count(self, name: str) -> int:
        value = self.optional_count(name)
        if value is None:
            raise _bad(self._file, f"metadata {self._prefix + name!r} is missing")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.raw(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise _bad(self._file, f"metadata {self._prefix + name!r} is {_short(value)}, expected a positive number")
        return float(value)


def _token_ids(file: GGUFFile) -> dict[str, int]:
    ids = {kind: file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos")}
    ids["pad"] = file.metadata.get("tokenizer.ggml.padding_token_id")
    return {f"{kind}_token_id": value for kind, value in ids.items() if isinstance(value, int)}


def _rope(file: GGUFFile, read: _Reader, head_dim: int) -> dict[str, Any]:
    theta = read.number("rope.freq_base", 10000.0)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = read.raw("rope.scaling.type")
    if kind == "linear" or (kind is None and read.raw("rope.scale_linear") is not None):
        name = "rope.scaling.factor" if kind == "linear" else "rope.scale_linear"
        parameters.update(rope_type="linear", factor=read.number(name))
    elif kind == "yarn":
        parameters.update(rope_type="yarn", factor=read.number("rope.scaling.factor"))
        parameters["original_max_position_embeddings"] = read.count("rope.scaling.original_context_length")
        if read.raw("rope.scaling.attn_factor") is not None:
            parameters["attn_factor"] = read.number("rope.scaling.attn_factor")
    elif kind not in (None, "none"):
        raise _bad(file, f"rope scaling of type {kind!r} is not supported; supported are linear, yarn and Llama 3's")
    if _ROPE_TENSOR in file.tensors:
        parameters.update(_llama3(file, head_dim, theta))
    facts = {"rope_theta": theta, "rope_parameters": parameters}
    rotated = read.optional_count("rope.dimension_count")
    if rotated is not None and rotated != head_dim:
        facts["partial_rotary_factor"] = rotated / head_dim
    return facts


def _llama3(file: GGUFFile, head_dim: int, theta: float) -> dict[str, Any]:
    """Recognise the divisors of Llama 3's rope, so that the model computes them as from config.json."""
    info = file.tensors[_ROPE_TENSOR]
    if info.ggml_type != GGMLType.F32 or info.shape != (head_dim // 2,):
        raise _bad(file, f"tensor {_ROPE_TENSOR!r} should be {head_dim // 2} numbers of type F32")
    stored = file.data(info).view(np.float32).astype(np.float64)
    factor = float(round(float(stored.max()), 4))
    if factor <= 1.0:
        return {}
    expected = _llama3_divisors(head_dim, theta, factor)
    if not np.allclose(stored, expected, rtol=1e-3):
        raise _bad(file, f"tensor {_ROPE_TENSOR!r} is not the rope scaling of Llama 3, the only kind supported")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _llama3_divisors(head_dim: int, theta: float, factor: float) -> np.ndarray[Any, Any]:
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = _LLAMA3["original_max_position_embeddings"] / wavelengths
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:80] + "..."


def _bad(file: GGUFFile, reason: str) -> ModelFileError:
    return ModelFileError(f"{file.path}: {reason}", code="model-facts")
