"""Model facts of a GGUF file under Hugging Face's names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hardpoint.config.gguf_file import GGMLType, GGUFFile
from hardpoint.errors import ModelFileError

# Llama 3's rope is stored as a tensor of divisors; these are the constants that all its sizes share.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_ROPE_TENSOR = "rope_freqs.weight"
_LONG_ROPE_TENSOR = "rope_factors_long.weight"
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def facts_of(file: GGUFFile) -> dict[str, Any]:
    """Return what config.json would state. Raises `ModelFileError` naming the key or tensor that is wrong."""
    kind = _kind(file)
    read = _Reader(file, file.metadata["general.architecture"])
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise _bad(file, "it has no tensor 'token_embd.weight' of two dimensions")
    heads = read.count("attention.head_count")
    hidden = read.count("embedding_length")
    head_dim = read.optional_count("attention.key_length") or hidden // heads
    facts = {
        "architectures": [kind.model_class],
        "model_type": kind.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": read.count("feed_forward_length"),
        "num_hidden_layers": read.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read.optional_count("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "max_position_embeddings": read.count("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        **_token_ids(file),
    }
    if read.optional_count("attention.value_length") not in (None, head_dim):
        raise _bad(file, "its value heads differ in size from its key heads, which is not supported")
    return facts | kind.more(file, read, facts)


def generation_of(file: GGUFFile) -> dict[str, Any]:
    """Return what generation_config.json would state: end tokens and the sampling defaults in the file."""
    found = {name: file.metadata[key] for key, name in _SAMPLING.items() if key in file.metadata}
    ends = [file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ids = list(dict.fromkeys(end for end in ends if isinstance(end, int)))
    return {**found, "eos_token_id": ids} if ids else found


def _kind(file: GGUFFile) -> _Kind:
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise _bad(file, f"it holds a {kind}, not a model")
    architecture = file.metadata.get("general.architecture")
    found = KINDS.get(architecture) if isinstance(architecture, str) else None
    if found is None:
        raise ModelFileError(
            f"{file.path}: models of the GGUF architecture {architecture!r} are not supported",
            code="model-architecture",
            fix=f"supported as GGUF: {', '.join(KINDS)}",
        )
    experts = bool(file.metadata.get(f"{architecture}.expert_count"))
    if experts and found.with_experts is None:
        raise ModelFileError(
            f"{file.path}: {architecture} models with experts are not supported", code="model-architecture"
        )
    return found.with_experts if experts and found.with_experts is not None else found


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
    elif kind not in (None, "none") and not (kind == "longrope" and _LONG_ROPE_TENSOR in file.tensors):
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


def _llama(file: GGUFFile, read: _Reader, facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon"),
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        **_rope(file, read, facts["head_dim"]),
    }


def _mixtral(file: GGUFFile, read: _Reader, facts: dict[str, Any]) -> dict[str, Any]:
    return {
        **_llama(file, read, facts),
        "num_local_experts": read.count("expert_count"),
        "num_experts_per_tok": read.count("expert_used_count"),
    }


def _qwen3_moe(file: GGUFFile, read: _Reader, facts: dict[str, Any]) -> dict[str, Any]:
    return {
        **_llama(file, read, facts),
        "num_experts": read.count("expert_count"),
        "num_experts_per_tok": read.count("expert_used_count"),
        "moe_intermediate_size": read.count("expert_feed_forward_length"),
        # Not in the file: all models of this kind that were converted have it so.
        "norm_topk_prob": True,
    }


def _gemma(file: GGUFFile, read: _Reader, facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon"),
        **_rope(file, read, facts["head_dim"]),
    }


def _gemma2(file: GGUFFile, read: _Reader, facts: dict[str, Any]) -> dict[str, Any]:
    return {
        **_gemma(file, read, facts),
        "attn_logit_softcapping": read.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": read.number("final_logit_softcapping", 30.0),
        "sliding_window": read.optional_count("attention.sliding_window") or 4096,
        "query_pre_attn_scalar": _scores_of_gemma(facts, largest=46),
    }


def _gemma3(file: GGUFFile, read: _Reader, facts: dict[str, Any]) -> dict[str, Any]:
    found = _gemma(file, read, facts)
    local = {"rope_type": "default", "rope_theta": read.number("rope.freq_base_swa", 10000.0)}
    cap = read.raw("final_logit_softcapping")
    return {
        "rms_norm_eps": found["rms_norm_eps"],
        "rope_parameters": {"full_attention": found["rope_parameters"], "sliding_attention": local},
        "sliding_window": read.optional_count("attention.sliding_window") or 4096,
        "sliding_window_pattern": read.optional_count("attention.sliding_window_pattern") or 6,
        "final_logit_softcapping": None if cap is None else read.number("final_logit_softcapping"),
        "attn_logit_softcapping": None,
        "query_pre_attn_scalar": _scores_of_gemma(facts, largest=62),
    }


def _scores_of_gemma(facts: dict[str, Any], largest: int) -> int:
    """What scores are scaled by, which files do not state: only the largest model does not use its head size."""
    if facts["num_hidden_layers"] == largest:
        return facts["hidden_size"] // facts["num_attention_heads"]
    return facts["head_dim"]


def _phi3(file: GGUFFile, read: _Reader, facts: dict[str, Any]) -> dict[str, Any]:
    found = {
        **_llama(file, read, facts),
        "attention_bias": False,
        "sliding_window": read.optional_count("attention.sliding_window"),
    }
    original = read.optional_count("rope.scaling.original_context_length") or facts["max_position_embeddings"]
    found["original_max_position_embeddings"] = original
    if _LONG_ROPE_TENSOR not in file.tensors:
        return found
    names = {"long": _LONG_ROPE_TENSOR, "short": "rope_factors_short.weight"}
    rope = {**found["rope_parameters"], "rope_type": "longrope", "original_max_position_embeddings": original}
    rope.update({f"{kind}_factor": _numbers(file, name) for kind, name in names.items()})
    if read.raw("rope.scaling.attn_factor") is not None:
        rope["attention_factor"] = read.number("rope.scaling.attn_factor")
    return {**found, "rope_parameters": rope}


def _numbers(file: GGUFFile, name: str) -> list[float]:
    info = file.tensors.get(name)
    if info is None or info.ggml_type != GGMLType.F32 or len(info.shape) != 1:
        raise _bad(file, f"it has no tensor {name!r} of numbers of type F32")
    return [float(number) for number in file.data(info).view(np.float32)]


def _gpt2(file: GGUFFile, read: _Reader, facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "activation_function": "gelu_new",
        "n_inner": facts["intermediate_size"],
        "n_positions": facts["max_position_embeddings"],
        "layer_norm_epsilon": read.number("attention.layer_norm_epsilon"),
    }


class _Kind(NamedTuple):
    """A GGUF architecture: the class that runs it, Hugging Face's name for it, and what else its files state."""

    model_class: str
    model_type: str
    more: Callable[[GGUFFile, _Reader, dict[str, Any]], dict[str, Any]]
    with_experts: Any = None


_QWEN3_MOE = _Kind("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3_moe)

# fmt: off
KINDS = {
    "llama":    _Kind("LlamaForCausalLM",    "llama", _llama, _Kind("MixtralForCausalLM", "mixtral", _mixtral)),
    "qwen2":    _Kind("Qwen2ForCausalLM",    "qwen2",       _llama),
    "qwen3":    _Kind("Qwen3ForCausalLM",    "qwen3",       _llama),
    "qwen3moe": _QWEN3_MOE._replace(with_experts=_QWEN3_MOE),
    "gemma":    _Kind("GemmaForCausalLM",    "gemma",       _gemma),
    "gemma2":   _Kind("Gemma2ForCausalLM",   "gemma2",      _gemma2),
    "gemma3":   _Kind("Gemma3ForCausalLM",   "gemma3_text", _gemma3),
    "phi3":     _Kind("Phi3ForCausalLM",     "phi3",        _phi3),
    "gpt2":     _Kind("GPT2LMHeadModel",     "gpt2",        _gpt2),
}
# fmt: on


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:80] + "..."


def _bad(file: GGUFFile, reason: str) -> ModelFileError:
    return ModelFileError(f"{file.path}: {reason}", code="model-facts")
