"""Tensors that are still in their file behave like the numbers they stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hardpoint.worker.loaders import stored
from hardpoint.worker.loaders.stored import StoredTensor

ROWS, COLUMNS = 37, 24
NUMBERS = np.random.default_rng(1).normal(size=(ROWS, COLUMNS)).astype(np.float32)


def decode(rows):
    assert rows.dtype == torch.uint8
    return rows.view(torch.float32)


def make(order=None):
    raw = NUMBERS.view(np.uint8).copy()
    raw.setflags(write=False)
    return StoredTensor(raw, (ROWS, COLUMNS), decode, order)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(stored, "_TILE", 5 * COLUMNS)


@pytest.fixture
def no_decoding_of_the_whole(monkeypatch):
    def refuse(self):
        raise AssertionError("decoded outside of a parameter")

    monkeypatch.setattr(StoredTensor, "numbers", refuse)


def test_facts_are_told_without_decoding(no_decoding_of_the_whole):
    tensor = make()
    assert tuple(tensor.shape) == tuple(tensor.size()) == (ROWS, COLUMNS)
    assert (tensor.dim(), tensor.ndim, tensor.numel(), len(tensor)) == (2, 2, ROWS * COLUMNS, ROWS)
    assert (tensor.dtype, tensor.device.type, tensor.is_floating_point()) == (torch.float32, "cpu", True)
    assert tensor.size(-1) == tensor.shape[1] == COLUMNS
    assert "37, 24" in repr(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_go_straight_into_the_target(dtype, no_decoding_of_the_whole):
    target = torch.nn.Parameter(torch.empty(ROWS, COLUMNS, dtype=dtype), requires_grad=False)
    assert target.data.copy_(make()) is not None
    torch.testing.assert_close(target.data, torch.from_numpy(NUMBERS).to(dtype))


def test_cuts_stay_in_the_file(no_decoding_of_the_whole):
    whole = torch.from_numpy(NUMBERS)
    cuts = {
        "rows": (make().narrow(0, 3, 20), whole[3:23]),
        "columns": (make().narrow(1, 8, 8), whole[:, 8:16]),
        "last dimension": (make().narrow(-1, 8, 8), whole[:, 8:16]),
        "rows of rows": (make().narrow(0, 3, 20)[4:], whole[7:23]),
        "both": (make()[5:].narrow(1, 2, 3).narrow(0, 1, 30), whole[6:36, 2:5]),
    }
    for name, (cut, expected) in cuts.items():
        assert isinstance(cut, StoredTensor), name
        target = torch.empty(expected.shape)
        target.copy_(cut)
        assert torch.equal(target, expected), name


def test_rows_come_in_the_order_asked_for():
    order = np.random.default_rng(2).permutation(ROWS)
    target = torch.empty(20, COLUMNS)
    target.copy_(make(order).narrow(0, 10, 20))
    assert torch.equal(target, torch.from_numpy(NUMBERS[order][10:30]))


def test_vectors():
    vector = StoredTensor(NUMBERS[:1].view(np.uint8), (COLUMNS,), decode)
    target = torch.empty(10)
    target.copy_(vector.narrow(0, 2, 10))
    assert torch.equal(target, torch.from_numpy(NUMBERS[0, 2:12]))


def test_anything_else_works_on_the_numbers():
    whole = torch.from_numpy(NUMBERS)
    assert torch.equal(make() + 1, whole + 1)
    assert torch.equal(make().t(), whole.t())
    assert torch.equal(make().reshape(-1), whole.reshape(-1))
    assert torch.equal(make()[:, 1], whole[:, 1])
    assert torch.equal(make()[::2], whole[::2])
    assert torch.equal(F.linear(torch.ones(1, COLUMNS), make()), F.linear(torch.ones(1, COLUMNS), whole))
    assert torch.equal(torch.cat([make(), make()]), torch.cat([whole, whole]))
    assert torch.equal(make().to(torch.float64), whole.double())
    assert make()[0, 0].item() == whole[0, 0].item()
    assert type(make().clone()) is torch.Tensor


def test_a_wrong_target_is_an_error():
    with pytest.raises(RuntimeError):
        torch.empty(ROWS, COLUMNS + 1).copy_(make())
    with pytest.raises(RuntimeError):
        make().narrow(0, 30, 20)
