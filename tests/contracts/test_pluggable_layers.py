"""Every linear layer of ours can be replaced whole."""

from __future__ import annotations

import pytest
import torch

from hardpoint.testing import check_pluggable_layer
from hardpoint.worker.layers import linear

SIZES = {
    "ReplicatedLinear": (16, 8),
    "ColumnParallelLinear": (16, 8),
    "RowParallelLinear": (16, 8),
    "MergedColumnParallelLinear": (16, [4, 4]),
    "QKVParallelLinear": (16, 4, 2, 1),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_replacement_that_changes_nothing_computes_the_same(name):
    replaced = getattr(linear, name)
    check_pluggable_layer(type(f"My{name}", (replaced,), {}), replaced, *SIZES[name], inputs=(torch.randn(3, 16),))
