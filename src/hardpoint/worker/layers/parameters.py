"""Attributes on parameters, through which loaders and quantisation methods speak."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hardpoint.worker.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)


def set_weight_attrs(weight: torch.Tensor, weight_attrs: dict[str, Any] | None) -> None:
    """Put attributes on a parameter, e.g. `weight_loader`; AssertionError when one is there already."""
    for key, value in (weight_attrs or {}).items():
        assert not hasattr(weight, key), f"the parameter already has the attribute {key!r}"
        setattr(weight, key, value)


def replace_parameter(layer: nn.Module, name: str, new: torch.Tensor) -> None:
    """Put `new` in the place of a layer's parameter, keeping its loading attributes."""
    old = getattr(layer, name)
    if not isinstance(new, nn.Parameter):
        new = nn.Parameter(new, requires_grad=False)
    for key, value in vars(old).items():
        if not hasattr(new, key):
            setattr(new, key, value)
    layer.register_parameter(name, new)


def default_weight_loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Copy a checkpoint's tensor into a parameter of the same shape; ValueError when it differs.

    A single number fills a parameter of one element, whatever their shapes.
    """
    if param.numel() == 1 and loaded_weight.numel() == 1:
        param.data.fill_(loaded_weight.item())
        return
    check_shape(param, loaded_weight)
    param.data.copy_(loaded_weight)


def check_shape(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """ValueError naming both shapes when they differ."""
    if param.shape != loaded_weight.shape:
        raise ValueError(f"its shape is {tuple(loaded_weight.shape)}, the model has {tuple(param.shape)}")


def row_parallel_weight_loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Copy this rank's part of the first dimension."""
    sharded_weight_loader(0)(param, loaded_weight)


def sharded_weight_loader(shard_axis: int) -> Any:
    """A weight loader that copies this rank's part of one dimension."""

    def loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        check_size(loaded_weight, shard_axis, param.size(shard_axis) * get_tensor_model_parallel_world_size())
        default_weight_loader(param, shard_of(loaded_weight, shard_axis, param.size(shard_axis)))

    return loader


def check_size(weight: torch.Tensor, dim: int, size: int) -> None:
    """ValueError naming both when a tensor is not `size` long in dimension `dim`."""
    if dim >= weight.dim() or weight.size(dim) != size:
        raise ValueError(f"its shape is {tuple(weight.shape)}, the model wants {size} in dimension {dim}")


def shard_of(weight: torch.Tensor, dim: int, size: int, rank: int | None = None) -> torch.Tensor:
    """Part `rank` of a tensor that is split into parts of `size` along `dim`; this rank's unless given."""
    index = get_tensor_model_parallel_rank() if rank is None else rank
    return part_of(weight, dim, index * size, size)


def part_of(weight: torch.Tensor, dim: int, start: int, size: int) -> torch.Tensor:
    """`size` elements along `dim` from `start` on."""
    return weight if start == 0 and size == weight.size(dim) else weight.narrow(dim, start, size)
