"""Every operation of ours can be replaced by a class that derives from it."""

from __future__ import annotations

import inspect

import pytest
import torch

from hardpoint.contracts.custom_op import CustomOp, op_registry
from hardpoint.extensions.refs import load_ref
from hardpoint.testing import check_custom_op

# Importing a layer's module registers its operations.
for module in ("layernorm", "activation", "rotary_embedding"):
    load_ref(f"hardpoint.worker.layers.{module}:__name__")
OPS = {
    name: cls for name, cls in op_registry.items() if issubclass(cls, CustomOp) and cls.__module__[:9] == "hardpoint"
}
ARGUMENTS = {"rms_norm": (16,), "gemma_rms_norm": (16,), "layer_norm": (16,)}


def test_there_are_some():
    assert {"rms_norm", "silu_and_mul"} <= set(OPS)


@pytest.mark.parametrize("name", [name for name in OPS if name in ARGUMENTS or name.endswith("_and_mul")])
def test_a_replacement_that_changes_nothing_computes_the_same(name):
    replaced = OPS[name]
    forward = {"forward_native": lambda self, *args: replaced.forward_native(self, *args)}
    mine = type(f"My{replaced.__name__}", (replaced,), forward)
    x = torch.randn(3, 16)
    check_custom_op(mine, replaced, *ARGUMENTS.get(name, ()), inputs=(x,))


@pytest.mark.parametrize("name", OPS)
def test_every_operation_has_a_plain_form(name):
    assert OPS[name].forward_native is not CustomOp.forward_native
    assert not inspect.iscoroutinefunction(OPS[name].forward_native)
