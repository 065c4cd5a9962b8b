"""A model's facts under Hugging Face's names: attribute access over the contents of config.json."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from hardpoint.config.model_defaults import fill
from hardpoint.config.sections.base import near_miss
from hardpoint.errors import ConfigError, ModelFileError

# Keys ending in _config that stay dicts, as in transformers.
_STAYS_DICT = {"quantization_config", "compression_config"}

# Keys that may be overridden although a config.json does not state them.
# fmt: off
KNOWN_KEYS = frozenset({
    "architectures", "model_type", "torch_dtype", "dtype", "vocab_size", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "hidden_activation", "activation_function", "max_position_embeddings", "n_positions", "max_sequence_length",
    "model_max_length", "seq_length", "initializer_range", "rms_norm_eps", "layer_norm_eps",
    "layer_norm_epsilon", "norm_eps", "norm_epsilon", "use_cache", "tie_word_embeddings", "rope_theta",
    "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_dim", "rotary_pct",
    "original_max_position_embeddings", "attention_bias", "attention_dropout", "mlp_bias", "bias",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "sliding_window_pattern",
    "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "logit_scale",
    "logits_scaling", "embedding_multiplier", "residual_multiplier", "attention_multiplier", "qk_norm",
    "use_qk_norm", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
    "cls_token_id", "mask_token_id", "num_labels", "id2label", "label2id", "problem_type", "classifier_dropout",
    "is_decoder", "is_encoder_decoder", "is_causal", "cross_attention_hidden_size", "add_cross_attention",
    "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "n_shared_experts",
    "moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob", "first_k_dense_replace",
    "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers", "router_aux_loss_coef", "scoring_func",
    "topk_method", "topk_group", "n_group", "routed_scaling_factor", "kv_lora_rank", "q_lora_rank",
    "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "text_config", "vision_config", "audio_config",
    "quantization_config", "compression_config", "auto_map", "transformers_version", "type_vocab_size",
    "position_embedding_type", "hidden_dropout_prob", "attention_probs_dropout_prob", "pooler_config",
    "matryoshka_dimensions", "is_matryoshka", "layers_block_type", "attention_free", "num_nextn_predict_layers",
    "pretraining_tp", "alibi", "max_model_len", "generation_config",
})
# fmt: on


class MissingFactError(ModelFileError, AttributeError):
    """A model asks its config for a key that is not there."""

    def __init__(self, name: str, known: Iterable[str] = ()) -> None:
        super().__init__(f"the model's config has no {name!r}", code="model-facts")
        self._name = name
        self._known = known

    def __str__(self) -> str:
        # Looked for only when someone reads it: most callers have a default and go on.
        return f"{self.what}{near_miss(self._name, self._known)}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._name, tuple(self._known))


class HFConfig:
    """The contents of a config.json: `config.hidden_size`; a missing key is an AttributeError.

    Nested objects whose key ends in `_config` are HFConfig too, other values are as in JSON.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        for key, value in values.items():
            nests = isinstance(value, dict) and key.endswith("_config") and key not in _STAYS_DICT
            self.__dict__[key] = HFConfig(value) if nests else value

    def __getattr__(self, name: str) -> Any:
        raise MissingFactError(name, self.__dict__)

    def __contains__(self, name: object) -> bool:
        return name in self.__dict__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HFConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"HFConfig({self.to_dict()!r})"

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, or `default` where the config does not state it."""
        return self.__dict__.get(name, default)

    def to_dict(self) -> dict[str, Any]:
        """Return plain nested dicts."""
        return {key: value.to_dict() if isinstance(value, HFConfig) else value for key, value in self.__dict__.items()}

    def update(self, values: dict[str, Any]) -> None:
        """Set several values."""
        for key, value in values.items():
            setattr(self, key, value)

    def get_text_config(self, decoder: bool = False) -> HFConfig:
        """Return the text part of a model of several parts, else the whole."""
        nested = self.__dict__.get("text_config")
        return nested if isinstance(nested, HFConfig) else self


def complete(values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy in which the model kind's defaults and both spellings of the rope settings are present."""
    full = copy.deepcopy(values)
    fill(full)
    if isinstance(full.get("text_config"), dict):
        full["text_config"] = complete(full["text_config"])
    if full.get("num_attention_heads") and full.get("num_key_value_heads") is None:
        full["num_key_value_heads"] = full["num_attention_heads"]
    if full.get("dtype") is None and full.get("torch_dtype") is not None:
        full["dtype"] = full["torch_dtype"]
    _complete_rope(full)
    return full


def _complete_rope(full: dict[str, Any]) -> None:
    """Older configs have rope_theta and rope_scaling, newer ones rope_parameters: state both."""
    given = full.get("rope_parameters") or full.get("rope_scaling") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        # Settings per layer kind: only the model knows what to do with them.
        return
    if "rope_theta" not in full and "rope_theta" not in given and not given and "num_attention_heads" not in full:
        return
    theta = given.get("rope_theta") or full.get("rope_theta") or 10000.0
    kind = given.get("rope_type") or given.get("type") or "default"
    rope = {key: value for key, value in given.items() if key != "type"}
    full["rope_parameters"] = {**rope, "rope_type": kind, "rope_theta": theta}
    full["rope_theta"] = theta
    full["rope_scaling"] = None if kind == "default" else {**rope, "rope_type": kind}


def merge_overrides(values: dict[str, Any], overrides: dict[str, Any], strict: bool) -> list[str]:
    """Merge `--hf-overrides` into a config.json's contents, nested objects key by key.

    strict  raise `ConfigError` for a key that neither the config nor Hugging Face knows
    Returns the keys that are not known; empty when `strict`.
    """
    known = KNOWN_KEYS | set(values)
    unknown = _merge(values, overrides, "")
    if unknown and strict:
        name = unknown[0]
        hint = near_miss(name.rpartition(".")[2], sorted(known))
        raise ConfigError(
            f"--hf-overrides has the key {name!r}, which the model's config does not have{hint}",
            code="config-hf-overrides",
        )
    return unknown


def _merge(values: dict[str, Any], overrides: dict[str, Any], prefix: str) -> list[str]:
    unknown = []
    for key, value in overrides.items():
        known = key in values or key in KNOWN_KEYS
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            # Inside a known object any key goes: what rope or quantisation settings mean is the model's business.
            inner = _merge(values[key], value, f"{prefix}{key}.")
            unknown += inner if key.endswith("_config") and key not in _STAYS_DICT else []
        else:
            values[key] = copy.deepcopy(value)
        if not known:
            unknown.append(prefix + key)
    return unknown


def text_part(hf_config: Any) -> Any:
    """Return the text part of a model's facts: the nested one, or the whole."""
    nested = getattr(hf_config, "text_config", None)
    return hf_config if nested is None else nested
