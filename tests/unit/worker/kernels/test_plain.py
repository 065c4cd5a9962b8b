"""Products with plain weights: as in torch, the same in any company, and left to torch where it has to do them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hardpoint.worker.kernels import plain

TYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def kernels_only(library, monkeypatch):
    """Calls of torch's product are noted; bfloat16 is the kernels' on any processor."""
    calls = []
    original = F.linear

    def noted(*args):
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(plain, "_torch_is_faster", lambda multiplied: False)
    monkeypatch.setattr(F, "linear", noted)
    return calls


def exact(x, weight, bias=None):
    return x.double() @ weight.double().T + (0 if bias is None else bias.double())


@pytest.mark.parametrize("isa", ["avx512", "avx2", "generic"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (16, 32), (35, 77), (70, 16), (9, 500)])
def test_products_are_exact_and_alone_as_in_company(isa, dtype, rows, columns, library, kernels_only):
    if isa not in library.isas:
        isa = "generic"
    library.use_isa(isa)
    weight, bias = torch.randn(rows, columns).to(dtype), torch.randn(rows).to(dtype)
    x = torch.randn(70, columns).to(dtype)
    alone = torch.cat([plain.linear(row[None], weight, bias) for row in x])
    expected = exact(x, weight, bias)
    assert alone.dtype is dtype
    assert torch.allclose(alone.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-5 * columns**0.5)
    for count in (2, 3, 5, 7, 8, 13, 70):
        assert torch.equal(plain.linear(x[:count], weight, bias), alone[:count])
    library.set_threads(1)
    assert torch.equal(plain.linear(x, weight, bias), alone)
    assert not kernels_only


def test_inputs_may_lie_anyhow(kernels_only):
    weight, wide = torch.randn(20, 24), torch.randn(6, 48)
    for x in (wide[:, 24:], wide[::2, :24], torch.randn(24, 6).T, torch.randn(2, 3, 24), torch.randn(24)):
        found = plain.linear(x, weight)
        assert found.shape == (*x.shape[:-1], 20)
        assert torch.allclose(found.double(), exact(x, weight), atol=1e-5)
    assert not kernels_only


def test_nothing_is_read_beyond_a_weight(kernels_only):
    # The weight is the middle of a tensor of NaN.
    around = torch.full((3, 19, 21), float("nan"))
    around[1] = torch.randn(19, 21)
    x = torch.randn(5, 21)
    assert torch.allclose(plain.linear(x, around[1]).double(), exact(x, around[1]), atol=1e-5)
    assert not kernels_only


def test_what_is_not_finite_stays_with_its_token(kernels_only):
    weight, x = torch.randn(18, 40), torch.randn(4, 40)
    clean = plain.linear(x, weight)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    found = plain.linear(x, weight)
    assert found[1].isnan().all()
    assert found[2].isinf().all()
    assert torch.equal(found[[0, 3]], clean[[0, 3]])


class Odd(torch.Tensor):
    """Somebody's own kind of tensor."""


TORCH_DOES = {
    "no tokens": lambda: (torch.randn(0, 8), torch.randn(4, 8)),
    "another type": lambda: (torch.randn(2, 8).double(), torch.randn(4, 8).double()),
    "a weight that does not lie in one piece": lambda: (torch.randn(2, 8), torch.randn(8, 4).T),
    "a tensor of another class": lambda: (torch.randn(2, 8), torch.randn(4, 8).as_subclass(Odd)),
    "a bias that does not lie in one piece": lambda: (torch.randn(2, 8), torch.randn(4, 8), torch.randn(8)[::2]),
    "what is learnt": lambda: (torch.randn(2, 8), nn.Parameter(torch.randn(4, 8))),
    "meta tensors": lambda: (torch.randn(2, 8, device="meta"), torch.randn(4, 8, device="meta")),
}


@pytest.mark.parametrize("name", TORCH_DOES)
def test_torch_does(name, kernels_only):
    args = TORCH_DOES[name]()
    found = plain.linear(*args)
    assert len(kernels_only) == 1
    assert found.shape == (len(args[0]), 4)
    if found.device.type != "meta":
        assert torch.equal(found, F.linear(*args))


def test_sizes_that_do_not_fit_are_refused_as_in_torch(kernels_only):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        plain.linear(torch.randn(2, 9), torch.randn(4, 8))


@pytest.mark.parametrize("multiplied", [False, True])
def test_torch_does_bfloat16_where_it_is_faster(multiplied, kernels_only, monkeypatch, library):
    asked = []
    monkeypatch.setattr(plain, "_torch_is_faster", lambda multiplied: asked.append(multiplied) or True)
    monkeypatch.setattr(type(library), "bfloat_products", multiplied)
    plain.linear(torch.randn(2, 8).bfloat16(), torch.randn(4, 8).bfloat16())
    assert len(kernels_only) == 1
    assert asked == [multiplied]


def test_products_of_the_processor_are_used_where_it_has_them(library, kernels_only, monkeypatch):
    assert library.bfloat_products == (library.isa == "avx512" and torch.cpu._is_avx512_bf16_supported())
    if library.bfloat_products:
        monkeypatch.setattr(library, "plain_linear", None)
    weight, x = torch.randn(20, 40).bfloat16(), torch.randn(6, 80).bfloat16()
    for given in (x[:, 40:], x[::2, :40], torch.randn(40, 6).bfloat16().T, torch.randn(2, 3, 40).bfloat16(), x[0, :40]):
        found = plain.linear(given, weight)
        assert found.shape == (*given.shape[:-1], 20)
        assert torch.allclose(found.double(), exact(given, weight), rtol=2**-7, atol=1e-4)
    assert not kernels_only


def test_what_is_not_finite_stays_with_its_token_in_bfloat16(kernels_only):
    weight, x = torch.randn(18, 40).bfloat16(), torch.randn(4, 40).bfloat16()
    clean = plain.linear(x, weight)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    found = plain.linear(x, weight)
    assert found[1].isnan().all()
    assert found[2].isinf().all()
    assert torch.equal(found[[0, 3]], clean[[0, 3]])


def test_without_kernels_torch_does(kernels_only, monkeypatch):
    monkeypatch.setattr(plain, "kernels", lambda: None)
    plain.linear(torch.randn(2, 8), torch.randn(4, 8))
    assert len(kernels_only) == 1
