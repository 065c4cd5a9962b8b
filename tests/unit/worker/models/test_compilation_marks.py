"""Marking classes for compilation: what is accepted, inferred and refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hardpoint.contracts.model import IntermediateTensors
from hardpoint.worker.models.compilation import ignore_torch_compile, support_torch_compile
from hardpoint.worker.models.llama import LlamaModel


class Model(nn.Module):
    def forward(
        self, ids: torch.Tensor, extra: torch.Tensor | None, stage: IntermediateTensors | None = None, flag: bool = True
    ) -> torch.Tensor:
        return ids


def test_bare_and_called():
    for mark in (support_torch_compile, support_torch_compile()):
        cls = type("Marked", (Model,), {})
        assert mark(cls) is cls
        assert cls._compile_dynamic_arg_dims == {"ids": 0, "extra": 0, "stage": 0}
        assert torch.equal(cls()(torch.ones(2), None), torch.ones(2))
    assert "positions" in LlamaModel._compile_dynamic_arg_dims


def test_given_dims_and_conditions():
    cls = type("Marked", (Model,), {})
    support_torch_compile(dynamic_arg_dims={"ids": [0, 1]}, enable_if=bool, is_encoder=True)(cls)
    assert cls._compile_dynamic_arg_dims == {"ids": [0, 1]}
    assert cls._compile_enable_if is bool
    assert ignore_torch_compile(cls) is cls


def test_what_cannot_be_compiled_is_refused():
    with pytest.raises(TypeError, match="no forward"):
        support_torch_compile(type("Empty", (), {}))
    with pytest.raises(ValueError, match="dynamic_arg_dims"):
        support_torch_compile(type("Bare", (nn.Module,), {"forward": lambda self, ids: ids}))
    with pytest.raises(ValueError, match="positions"):
        support_torch_compile(dynamic_arg_dims={"positions": 0})(type("Marked", (Model,), {}))
