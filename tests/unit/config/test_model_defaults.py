"""What config.json files leave unsaid, held against the config classes of transformers."""

from __future__ import annotations

import pytest

from hardpoint.config.hf_config import complete
from hardpoint.errors import ModelFileError

SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8,
         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}  # fmt: skip
# As such files were written before rope_parameters and layer_types.
OLD = {
    "mistral": {**SIZES, "rope_theta": 1e6, "sliding_window": None},
    "mixtral": SIZES,
    "qwen2": {**SIZES, "rope_theta": 1e6, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 4},
    "qwen2 ": {**SIZES, "use_sliding_window": True, "sliding_window": 40, "max_window_layers": 4},
    "qwen3": {**SIZES, "rope_theta": 1e6},
    "qwen3_moe": {**SIZES, "num_experts": 8, "rope_scaling": {"type": "yarn", "factor": 4.0,
                  "original_max_position_embeddings": 32768}},
    "gemma": SIZES,
    "gemma ": {**SIZES, "hidden_act": "gelu", "hidden_activation": None},
    "gemma2": {**SIZES, "cache_implementation": "hybrid"},
    "gemma3_text": {**SIZES, "rope_local_base_freq": 5000.0, "rope_theta": 2e6, "sliding_window_pattern": 4,
                    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    "gemma3_text ": SIZES,
    "phi3": {**SIZES, "max_position_embeddings": 8192, "original_max_position_embeddings": 4096,
             "rope_scaling": {"type": "longrope", "long_factor": [2.0] * 8, "short_factor": [1.0] * 8}},
    "phi3 ": {**SIZES, "partial_rotary_factor": 0.5},
    "opt": {"vocab_size": 320, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    "gpt2": {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4},
}  # fmt: skip
READ = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "rms_norm_eps", "layer_types",
    "sliding_window", "tie_word_embeddings", "num_local_experts", "num_experts", "num_experts_per_tok",
    "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "query_pre_attn_scalar",
    "attn_logit_softcapping", "final_logit_softcapping", "do_layer_norm_before", "enable_bias", "word_embed_proj_dim",
    "activation_function", "layer_norm_epsilon",
)  # fmt: skip


@pytest.mark.parametrize("case", OLD)
def test_what_is_not_said_is_what_transformers_takes(case):
    from transformers import AutoConfig

    kind = case.strip()
    found = complete({**OLD[case], "model_type": kind})
    expected = AutoConfig.for_model(kind, **OLD[case])
    for name in READ:
        if not hasattr(expected, name) or (name not in found and getattr(expected, name) is None):
            continue
        if name == ("num_experts" if kind == "mixtral" else "num_local_experts"):
            continue  # the other family's word
        if name == "layer_types" and set(expected.layer_types) == {"full_attention"}:
            assert "sliding_attention" not in found.get(name, ())
            continue
        assert found.get(name) == getattr(expected, name), name
    assert found.get("head_dim") in (None, getattr(expected, "head_dim", None))
    if kind not in ("opt", "gpt2"):
        part = {name: found[name] for name in ("partial_rotary_factor",) if name in found}
        assert {**part, **rope(found["rope_parameters"])} == rope(expected.rope_parameters)
    if kind.startswith("gemma"):
        wanted = getattr(expected, "hidden_activation", None) or expected.hidden_act
        assert found["hidden_activation"] == wanted


def rope(parameters):
    """The settings that say something: what both have, with the names of kinds that are spelt in two ways."""
    if any(isinstance(value, dict) for value in parameters.values()):
        return {name: rope(value) for name, value in parameters.items()}
    kind = {"su": "longrope"}.get(parameters["rope_type"], parameters["rope_type"])
    left_out = {"type", "factor"} if kind == "longrope" else {"type"}
    known = {name: value for name, value in parameters.items() if name not in left_out and value is not None}
    if known.get("partial_rotary_factor") == 1.0:
        del known["partial_rotary_factor"]
    return {**known, "rope_type": kind}


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"model_type": "gemma2", **SIZES, "sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"model_type": "qwen2", **SIZES, "use_sliding_window": True, "max_window_layers": "x"}, "max_window_layers"),
        (
            {"model_type": "phi3", **SIZES, "original_max_position_embeddings": 0, "rope_scaling": {"type": "su"}},
            "original_max_position_embeddings",
        ),
    ],
)
def test_impossible_values_are_named(values, name):
    with pytest.raises(ModelFileError, match=name):
        complete(values)
