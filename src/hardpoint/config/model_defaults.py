"""What a model kind means when its config.json leaves a key out, or says it in the kind's own words."""

from __future__ import annotations

from typing import Any

from hardpoint.errors import ModelFileError

_LLAMA: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
_QWEN: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
}
_QWEN_LAYERS: dict[str, Any] = {"max_window_layers": 28}
_GEMMA: dict[str, Any] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": True,
}
_BERT: dict[str, Any] = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    "tie_word_embeddings": True,
}
_EXPERTS: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": False}

_LLAMA_SIZES: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_CLIP_VISION: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
_LLAVA_TOWER: dict[str, Any] = {
    "intermediate_size": 4096,
    "hidden_size": 1024,
    "patch_size": 14,
    "image_size": 336,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "vocab_size": 32000,
    "projection_dim": 768,
}

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llava": {
        "projector_hidden_act": "gelu",
        "vision_feature_select_strategy": "default",
        "vision_feature_layer": -2,
        "multimodal_projector_bias": True,
        "tie_word_embeddings": False,
    },
    "llama": _LLAMA,
    "mistral": {
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
    },
    "mixtral": {
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "qwen2": {**_QWEN, **_QWEN_LAYERS},
    "qwen3": {**_QWEN, **_QWEN_LAYERS, "head_dim": 128, "attention_bias": False},
    "qwen3_moe": {
        **_QWEN,
        **_EXPERTS,
        "attention_bias": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "gemma": {**_GEMMA, "max_position_embeddings": 8192},
    "gemma2": {
        **_GEMMA,
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window_pattern": 2,
    },
    "gemma3_text": {
        **_GEMMA,
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "phi3": {
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "opt": {
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "enable_bias": True,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "bert": {**_BERT, "pad_token_id": 0, "vocab_size": 30522, "max_position_embeddings": 512},
    "roberta": {**_BERT, "pad_token_id": 1, "vocab_size": 50265, "max_position_embeddings": 512},
    "xlm-roberta": {**_BERT, "pad_token_id": 1, "vocab_size": 30522, "max_position_embeddings": 512},
    "gpt2": {
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "n_positions": 1024,
        "tie_word_embeddings": True,
    },
}

# A kind's word -> the usual one; both are stated.
_OTHER_WORDS: dict[str, dict[str, str]] = {
    "gpt2": {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
    },
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "mixtral": {"num_experts": "num_local_experts"},
    "gemma": {"hidden_act": "hidden_activation"},
    "gemma3_text": {"_sliding_window_pattern": "sliding_window_pattern"},
}


def fill(values: dict[str, Any]) -> None:
    """State in a config.json's contents what its model kind leaves unsaid."""
    kind = str(values.get("model_type"))
    for theirs, usual in _OTHER_WORDS.get(kind, {}).items():
        if values.get(theirs) is not None:
            values.setdefault(usual, values[theirs])
    for key, value in _DEFAULTS.get(kind, {}).items():
        values.setdefault(key, value)
    finish = _FINISH.get(kind)
    if finish is not None:
        finish(values)


def _gpt2(values: dict[str, Any]) -> None:
    values.setdefault("max_position_embeddings", values["n_positions"])
    if values.get("hidden_size"):
        values["intermediate_size"] = values.get("n_inner") or 4 * values["hidden_size"]


def _opt(values: dict[str, Any]) -> None:
    if values.get("word_embed_proj_dim") is None:
        values["word_embed_proj_dim"] = values.get("hidden_size")
    values.setdefault("intermediate_size", values.get("ffn_dim"))


def _qwen(values: dict[str, Any]) -> None:
    """A window from a certain layer on, where it is asked for at all."""
    if not values.get("use_sliding_window"):
        values["sliding_window"] = None
        values.pop("layer_types", None)
    elif values.get("sliding_window") and not values.get("layer_types"):
        first = _count(values, "max_window_layers", 0)
        values["layer_types"] = _layers(values, lambda layer: layer >= first)


def _qwen3_moe(values: dict[str, Any]) -> None:
    if not values.get("use_sliding_window"):
        values["sliding_window"] = None


def _gemma(values: dict[str, Any]) -> None:
    if not values.get("hidden_activation"):
        # What the first checkpoints call gelu is the approximation they were trained with.
        values["hidden_activation"] = "gelu_pytorch_tanh"
    if values["hidden_activation"] == "gelu":
        values["hidden_activation"] = "gelu_pytorch_tanh"


def _alternating(values: dict[str, Any]) -> None:
    """All layers but every n-th have a window."""
    pattern = _count(values, "sliding_window_pattern", 1)
    if not values.get("layer_types"):
        values["layer_types"] = _layers(values, lambda layer: bool((layer + 1) % pattern))


def _gemma3(values: dict[str, Any]) -> None:
    _alternating(values)
    given = values.get("rope_parameters") or {}
    if any(isinstance(setting, dict) for setting in given.values()):
        return
    scaled = {"rope_type": "default", **(values.get("rope_scaling") or {}), **given}
    scaled["rope_type"] = scaled.pop("type", None) or scaled["rope_type"]
    scaled.setdefault("rope_theta", values.get("rope_theta") or 1e6)
    local = {"rope_type": "default", "rope_theta": values.get("rope_local_base_freq") or 10000.0}
    values["rope_parameters"] = {"full_attention": scaled, "sliding_attention": local}


def _phi3(values: dict[str, Any]) -> None:
    for name in ("rope_scaling", "rope_parameters"):
        rope = values.get(name)
        if not isinstance(rope, dict):
            continue
        kind = rope.get("rope_type") or rope.get("type")
        if kind in ("su", "longrope", "yarn"):
            # "su" is the first name of longrope.
            rope["rope_type"] = "longrope" if kind == "su" else kind
            original = _count(values, "original_max_position_embeddings", 1)
            rope.setdefault("original_max_position_embeddings", original)
            if rope["rope_type"] == "longrope" and rope.get("factor") is None:
                rope["factor"] = _count(values, "max_position_embeddings", 1) / original


def _count(values: dict[str, Any], name: str, least: int) -> int:
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 31:
        raise ModelFileError(
            f"{name!r} in the model's config is {value!r}, expected a number from {least} on", code="model-facts"
        )
    return value


def _layers(values: dict[str, Any], is_windowed: Any) -> list[str]:
    count = values.get("num_hidden_layers")
    layers = range(count) if isinstance(count, int) and 0 < count < 1 << 16 else ()
    return ["sliding_attention" if is_windowed(layer) else "full_attention" for layer in layers]


def _llava(values: dict[str, Any]) -> None:
    """The sizes of both parts: most checkpoints leave out what their language model calls usual."""
    text = values.get("text_config")
    text = values["text_config"] = dict(text) if isinstance(text, dict) else {}
    text.setdefault("model_type", "llama")
    if text["model_type"] == "llama":
        for key, value in _LLAMA_SIZES.items():
            text.setdefault(key, value)
    vision = values.get("vision_config")
    own = dict(vision) if isinstance(vision, dict) else dict(_LLAVA_TOWER)
    if own.setdefault("model_type", "clip_vision_model") == "clip_vision_model":
        own = {**_CLIP_VISION, **own}
    values["vision_config"] = own
    if values.get("image_token_index") is None:
        values["image_token_index"] = values.get("image_token_id", 32000)


_FINISH: dict[str, Any] = {
    "llava": _llava,
    "gpt2": _gpt2,
    "opt": _opt,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _alternating,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
}
