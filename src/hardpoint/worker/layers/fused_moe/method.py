"""How experts are stored and computed: plain weights here, other ways by a quantisation's own method."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import nn

from hardpoint.contracts.quantization import QuantizeMethodBase
from hardpoint.worker.kernels import plain
from hardpoint.worker.layers.parameters import default_weight_loader, set_weight_attrs

# Gate and up side by side, and down: the parts of an expert under the names weight loaders use.
GATE, UP, DOWN = "w1", "w3", "w2"


class FusedMoEMethodBase(QuantizeMethodBase):
    """Stores and computes the experts of a `FusedMoE`."""

    def __init__(self, moe: Any = None) -> None:
        self.moe = moe

    @abstractmethod
    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Give the layer its parameters; `weight_loader` is among the attributes they must get."""

    @abstractmethod
    def apply(self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] and [tokens, top_k] weights and ids -> [tokens, hidden], this rank's part of the sum."""

    def parameter_of(self, layer: Any, part: str, expert: int) -> nn.Parameter:
        """The parameter that holds a part ("w1", "w3" or "w2") of an expert."""
        return layer.w2_weight if part == DOWN else layer.w13_weight

    def load_part(self, param: nn.Parameter, tensor: torch.Tensor, expert: int, first_row: int) -> None:
        """Take this rank's part of a matrix of an expert, for the rows from `first_row` on."""
        default_weight_loader(param.data[expert].narrow(0, first_row, tensor.shape[0]), tensor)


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    """Plain weights: `w13_weight` [experts, 2 * intermediate, hidden], `w2_weight` [experts, hidden, intermediate]."""

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Uninitialised."""
        shapes = {
            "w13_weight": (num_experts, 2 * intermediate_size_per_partition, hidden_size),
            "w2_weight": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        for name, shape in shapes.items():
            weight = nn.Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
            layer.register_parameter(name, weight)
            set_weight_attrs(weight, extra_weight_attrs)

    def apply(self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """Expert by expert, over the tokens that chose it."""
        w13, w2 = layer.w13_weight, layer.w2_weight
        return compute_experts(
            layer, x, topk_weights, topk_ids,
            lambda expert, rows: plain.linear(rows, w13[expert]),
            lambda expert, rows: plain.linear(rows, w2[expert]),
        )  # fmt: skip


def compute_experts(
    layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, gate_up: Any, down: Any
) -> torch.Tensor:
    """The weighted sum of the chosen experts.

    gate_up, down  (expert, [rows, ...]) -> [rows, ...], the two products of an expert
    Experts are added up in the order of their numbers, whoever else is in the step.
    """
    out = torch.zeros_like(x)
    for expert in topk_ids.unique().tolist():
        rows, slots = (topk_ids == expert).nonzero(as_tuple=True)
        weights = topk_weights[rows, slots].unsqueeze(-1).to(x.dtype)
        inputs = x[rows]
        if layer.apply_router_weight_on_input:
            inputs = inputs * weights
        found = down(expert, layer.act_fn(gate_up(expert, inputs)))
        out.index_add_(0, rows, found if layer.apply_router_weight_on_input else found * weights)
    return out
