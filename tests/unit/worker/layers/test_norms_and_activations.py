"""Norms and activations, held against torch's own or transformers'."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hardpoint.errors import ModelFileError
from hardpoint.worker.layers.activation import (
    FastGELU,
    GeluAndMul,
    MulAndSilu,
    NewGELU,
    QuickGELU,
    ReLUSquaredActivation,
    ScaledActivation,
    SiluAndMul,
    get_act_and_mul_fn,
    get_act_fn,
)
from hardpoint.worker.layers.layernorm import GemmaRMSNorm, LayerNorm, RMSNorm


def rand(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    ours, theirs = RMSNorm(24, eps=1e-5, dtype=dtype), LlamaRMSNorm(24, eps=1e-5).to(dtype)
    weight = rand(24, dtype=dtype)
    ours.weight.data.copy_(weight)
    theirs.weight.data.copy_(weight)
    x, residual = rand(5, 24, dtype=dtype), rand(5, 24, dtype=dtype) * 2
    torch.testing.assert_close(ours(x), theirs(x))
    kept = x.clone(), residual.clone()
    normed, summed = ours(x, residual)
    torch.testing.assert_close(summed, x + residual)
    torch.testing.assert_close(normed, theirs(x + residual))
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


def test_rms_norm_without_weight_and_over_a_part():
    x = rand(5, 24)
    plain = RMSNorm(24, has_weight=False)
    assert not list(plain.parameters())
    torch.testing.assert_close(plain(x), x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt())
    part = RMSNorm(24, var_hidden_size=8)
    torch.testing.assert_close(part(x), x / (x[:, :8].pow(2).mean(-1, keepdim=True) + 1e-6).sqrt())


def test_gemma_and_layer_norm():
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm as Reference

    ours, theirs = GemmaRMSNorm(24), Reference(24)
    for norm in (ours, theirs):
        norm.weight.data.copy_(rand(24))
    x, residual = rand(5, 24), rand(5, 24) * 3
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours(x, residual)[0], theirs(x + residual))
    norm = LayerNorm(24, eps=1e-5)
    norm.weight.data.copy_(rand(24))
    norm.bias.data.copy_(rand(24) * 2)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (24,), rand(24), rand(24) * 2, 1e-5))


def test_gated_activations():
    x = rand(4, 20)
    one, two = x.chunk(2, -1)
    torch.testing.assert_close(SiluAndMul()(x), F.silu(one) * two)
    torch.testing.assert_close(GeluAndMul()(x), F.gelu(one) * two)
    torch.testing.assert_close(GeluAndMul("tanh")(x), F.gelu(one, approximate="tanh") * two)
    torch.testing.assert_close(MulAndSilu()(x), one * F.silu(two))
    with pytest.raises(ValueError, match="sinh"):
        GeluAndMul("sinh")
    for name, function in (("silu", F.silu), ("gelu", F.gelu)):
        torch.testing.assert_close(get_act_and_mul_fn(name)(x), function(one) * two)
        assert torch.equal(get_act_and_mul_fn(name).forward_native(x), get_act_and_mul_fn(name).forward_cuda(x))


@pytest.mark.parametrize(
    "name", ["gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "silu", "quick_gelu", "tanh"]
)
def test_plain_activations_by_name(name):
    from transformers.activations import ACT2FN

    x = rand(4, 20) * 3
    torch.testing.assert_close(get_act_fn(name)(x), ACT2FN[name](x), atol=1e-5, rtol=1e-4)


def test_names_of_the_plain_ops():
    ops = {NewGELU: "gelu_new", FastGELU: "gelu_fast", QuickGELU: "quick_gelu", ReLUSquaredActivation: "relu2"}
    assert {cls: cls.name for cls in ops} == ops
    scaled = ScaledActivation(get_act_fn("relu"), 20)
    scaled.scales.data.fill_(2.0)
    torch.testing.assert_close(scaled(rand(4, 20)), F.relu(rand(4, 20)) / 2)


def test_unknown_activations_are_refused_by_name():
    for choose in (get_act_fn, get_act_and_mul_fn):
        with pytest.raises(ModelFileError, match="'xielu'"):
            choose("xielu")
