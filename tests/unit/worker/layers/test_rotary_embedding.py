"""Rotary embeddings, held against transformers' tables of frequencies."""

from __future__ import annotations

import gc

import pytest
import torch

from hardpoint.errors import ModelFileError
from hardpoint.extensions.registry import isolated
from hardpoint.worker.layers.rotary_embedding import (
    _ROPE_DICT,
    DynamicNTKScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    RotaryEmbedding,
    RotaryEmbeddingBase,
    get_rope,
)

HEAD, LENGTH = 32, 256
ORIGINAL = {"original_max_position_embeddings": 64}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "theta": {"rope_type": "default", "rope_theta": 500000.0},
    "partial": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, **BANDS, **ORIGINAL},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, **ORIGINAL},
    "yarn betas": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 24, "beta_slow": 2, **ORIGINAL},
    "yarn mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "mscale": 0.8,
        "mscale_all_dim": 0.4,
        **ORIGINAL,
    },
    "yarn without factor": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": None, **ORIGINAL},
}


def expected_table(settings):
    """[LENGTH, rotary_dim] cosines then sines, from transformers."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=HEAD * 4, num_attention_heads=4, max_position_embeddings=LENGTH)
    config.rope_parameters = dict(settings)
    if settings["rope_type"] == "default":
        dim = int(HEAD * settings.get("partial_rotary_factor", 1))
        inv_freq, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
        inv_freq = 1 / settings["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim) if dim != HEAD else inv_freq
    else:
        length = int(LENGTH * settings["factor"]) if settings["rope_type"] == "dynamic" else None
        inv_freq, factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, "cpu", seq_len=length)
    angles = torch.outer(torch.arange(LENGTH).float(), inv_freq)
    return torch.cat([angles.cos(), angles.sin()], -1) * factor


@pytest.mark.parametrize("name", KINDS)
def test_tables_equal_those_of_transformers(name):
    rope = get_rope(HEAD, LENGTH, rope_parameters=KINDS[name], dtype=torch.float32)
    assert rope.cos_sin_cache.shape[0] >= LENGTH
    # Angles reach hundreds of radians in float32.
    torch.testing.assert_close(rope.cos_sin_cache[:LENGTH], expected_table(KINDS[name]), atol=1e-4, rtol=1e-4)


def rotate(x, position, pairs, table):
    """Turn one head's pairs of elements, by complex multiplication."""
    half = table.shape[-1] // 2
    turned = x.clone()
    for i, (a, b) in enumerate(pairs):
        number = complex(x[a], x[b]) * complex(table[position, i], table[position, half + i])
        turned[a], turned[b] = number.real, number.imag
    return turned


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_pairs_are_turned_by_the_angle_of_their_position(neox, share):
    settings = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": share}
    rope = get_rope(HEAD, LENGTH, neox, settings, torch.float32)
    dim = int(HEAD * share)
    pairs = [(i, i + dim // 2) if neox else (2 * i, 2 * i + 1) for i in range(dim // 2)]
    positions = torch.tensor([0, 3, 255])
    query, key = torch.randn(3, 2 * HEAD), torch.randn(3, HEAD)
    kept = query.clone()
    found_query, found_key = rope.forward_native(positions, query, key)
    assert torch.equal(query, kept)
    for row, position in enumerate(positions.tolist()):
        for head in range(2):
            part = slice(head * HEAD, (head + 1) * HEAD)
            expected = rotate(query[row, part], position, pairs, rope.cos_sin_cache)
            torch.testing.assert_close(found_query[row, part], expected, atol=1e-5, rtol=1e-4)
        expected = rotate(key[row], position, pairs, rope.cos_sin_cache)
        torch.testing.assert_close(found_key[row], expected, atol=1e-5, rtol=1e-4)
    assert rope.forward_native(positions, query)[1] is None
    half = rope.forward_native(positions, query.bfloat16(), key.bfloat16())[0]
    assert half.dtype == torch.bfloat16


def test_the_same_description_gives_the_same_layer():
    one = get_rope(HEAD, LENGTH, rope_parameters=KINDS["llama3"])
    assert type(one) is Llama3RotaryEmbedding
    assert get_rope(HEAD, LENGTH, rope_parameters=dict(reversed(KINDS["llama3"].items()))) is one
    assert get_rope(HEAD, LENGTH + 1, rope_parameters=KINDS["llama3"]) is not one
    assert get_rope(HEAD, LENGTH, rope_parameters=KINDS["llama3"], dtype=torch.bfloat16) is not one
    assert type(get_rope(HEAD, LENGTH)) is RotaryEmbedding
    with isolated():
        mine = Llama3RotaryEmbedding.register_oot(type("Mine", (Llama3RotaryEmbedding,), {}))
        assert type(get_rope(HEAD, LENGTH, rope_parameters=KINDS["llama3"])) is mine
    assert get_rope(HEAD, LENGTH, rope_parameters=KINDS["llama3"]) is one


def test_a_layer_that_no_model_uses_is_forgotten():
    get_rope(HEAD, 77)
    gc.collect()
    assert not [key for key in _ROPE_DICT if 77 in key]


def test_all_kinds_are_one_op():
    assert {cls.name for cls in (RotaryEmbeddingBase, RotaryEmbedding, DynamicNTKScalingRotaryEmbedding)} == {
        "rotary_embedding"
    }


def test_what_is_not_supported_is_refused_by_name():
    with pytest.raises(ModelFileError, match="'longrope'"):
        get_rope(HEAD, LENGTH, rope_parameters={"rope_type": "longrope"})
    with pytest.raises(ModelFileError, match="low_freq_factor"):
        get_rope(HEAD, LENGTH, rope_parameters={"rope_type": "llama3", "factor": 2.0})
    with pytest.raises(ModelFileError, match="factor"):
        get_rope(HEAD, LENGTH, rope_parameters={"rope_type": "linear"})
    with pytest.raises(ModelFileError, match="dual chunk"):
        get_rope(HEAD, LENGTH, dual_chunk_attention_config={})
