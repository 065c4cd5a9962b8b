"""Norms, rotary embeddings, activations and draws of the kernels, held against torch on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hardpoint.types.sampling_params import SamplingParams
from hardpoint.worker.layers.activation import GeluAndMul, SiluAndMul
from hardpoint.worker.layers.layernorm import GemmaRMSNorm, LayerNorm, RMSNorm
from hardpoint.worker.layers.rotary_embedding import get_rope
from hardpoint.worker.sampling.metadata import build_metadata
from hardpoint.worker.sampling.request import RequestSampling
from hardpoint.worker.sampling.sampler import Sampler

SIZES = (1, 7, 16, 33, 576, 1000)
SPECIAL = [0.0, -0.0, 1e-38, 1e30, 88.0, -88.0, 200.0, -200.0, float("nan"), float("-inf")]


@pytest.fixture(params=("avx512", "avx2", "generic"), autouse=True)
def isa(request, library):
    library.use_isa(request.param if request.param in library.isas else "generic")
    return library


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=2e-5, equal_nan=True)


@pytest.mark.parametrize("cls", [RMSNorm, GemmaRMSNorm, LayerNorm])
@pytest.mark.parametrize("size", SIZES)
def test_norms(cls, size):
    layer = cls(size)
    layer.weight.data.normal_()
    wide = torch.randn(5, 2 * size) * 3
    for x in (wide[:, :size], wide[:, :size].contiguous(), torch.randn(2, 3, size), torch.full((1, size), 1e-20)):
        close(layer.forward_cpu(x), layer.forward_native(x))
    x = torch.randn(3, size)
    x[1, 0] = float("nan")
    close(layer.forward_cpu(x), layer.forward_native(x))


@pytest.mark.parametrize("size", SIZES)
def test_norm_with_residual_leaves_what_it_was_given(size):
    layer, x, residual = RMSNorm(size), torch.randn(300, size), torch.randn(300, size)
    before = residual.clone()
    for found, wanted in zip(layer.forward_cpu(x, residual), layer.forward_native(x, residual), strict=True):
        close(found, wanted)
    assert torch.equal(before, residual)


@pytest.mark.parametrize("make", [SiluAndMul, GeluAndMul, lambda: GeluAndMul("tanh")])
@pytest.mark.parametrize("size", SIZES)
def test_activations(make, size):
    layer = make()
    x = torch.randn(40, 2 * size) * 4
    close(layer.forward_cpu(x), layer.forward_native(x))
    special = torch.tensor([SPECIAL]).repeat_interleave(2, 0).flatten()
    both = torch.cat((special, torch.ones_like(special))).unsqueeze(0)
    close(layer.forward_cpu(both), layer.forward_native(both))


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("size", "part"), [(64, 1.0), (80, 0.5), (20, 1.0)])
def test_rotary(neox, size, part):
    layer = get_rope(size, 128, neox, {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": part})
    positions = torch.randint(0, 128, (9,))
    fused = torch.randn(9, 8 * size)
    query, key = fused[:, : 3 * size], fused[:, 3 * size : 5 * size]
    before = fused.clone()
    for found, wanted in zip(
        layer.forward_cpu(positions, query, key), layer.forward_native(positions, query, key), strict=True
    ):
        close(found, wanted)
    assert torch.equal(before, fused)
    with pytest.raises(IndexError, match="128"):
        layer.forward_cpu(torch.tensor([128]), query[:1], key[:1])


def test_a_method_that_was_replaced_is_called(monkeypatch):
    layer = RMSNorm(16)
    monkeypatch.setattr(RMSNorm, "forward_native", lambda self, x, residual=None: x * 0 + 5)
    assert (layer.forward_cpu(torch.randn(2, 16)) == 5).all()


VOCAB = 3001


def drawn(logits, params, library):
    rows = [RequestSampling(SamplingParams(**one), [1], [7] * (i % 5), VOCAB) for i, one in enumerate(params)]
    sampler = Sampler(seed=3)
    sampler._library = library
    found = sampler(logits.clone(), build_metadata(rows, torch.device("cpu")))
    return found.sampled_token_ids.flatten().tolist(), found.faults


def test_seeded_draws_are_those_of_torch(isa):
    params = [
        {"temperature": t, "top_p": p, "top_k": k, "min_p": m, "seed": 5}
        for t in (0.3, 1.0, 4.0) for p in (1.0, 0.9, 0.2) for k in (0, 1, 40, 2000) for m in (0.0, 0.05)
    ]  # fmt: skip
    for scale in (1.0, 5.0):
        logits = torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(1)) * scale
        assert drawn(logits, params, isa) == drawn(logits, params, None)


def test_greedy_rows_take_the_first_of_the_best(isa):
    logits = torch.zeros(3, VOCAB)
    logits[1, [77, 2500]] = 4.0
    logits[2, 3000] = 1.0
    assert drawn(logits, [{"temperature": 0.0}] * 3, isa)[0] == [0, 77, 3000]


def test_draws_without_a_seed_follow_the_weights(isa):
    weights = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = torch.full((4000, VOCAB), -50.0)
    logits[:, [5, 700, 1500, 2999]] = weights.log()
    for params, kept in (({}, 4), ({"top_k": 2}, 2), ({"top_p": 0.9}, 3), ({"min_p": 0.2}, 3)):
        tokens, _ = drawn(logits, [{"temperature": 1.0, **params}] * len(logits), isa)
        counts = np.array([tokens.count(token) for token in (5, 700, 1500, 2999)]) / len(logits)
        expected = (weights[:kept] / weights[:kept].sum()).numpy()
        np.testing.assert_allclose(counts, np.pad(expected, (0, 4 - kept)), atol=0.035)


def test_rows_without_a_token_end_alone(isa):
    logits = torch.randn(4, VOCAB)
    logits[0, 9] = float("nan")
    logits[1] = float("-inf")
    logits[2, 33] = float("inf")
    for params in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "top_p": 0.5}):
        tokens, faults = drawn(logits, [params] * 4, isa)
        assert set(faults) == {0, 1}
        assert "NaN" in faults[0]
        assert tokens[2] == 33
