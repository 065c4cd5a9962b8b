"""The groups of ranks a model is split over, and what they exchange.

Layers ask for their rank and group size here and never assume that they are alone; with one rank
every exchange is the identity.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hardpoint.config.sections.model import stage_layers
from hardpoint.worker.distributed.group import GroupCoordinator as GroupCoordinator
from hardpoint.worker.distributed.rendezvous import join_world

_GROUP_NAMES = ("world", "tp", "pp", "dp", "ep", "pcp", "dcp")
_groups: dict[str, GroupCoordinator] = {}
# What `initialize_model_parallel` makes groups with, as `init_distributed_environment` was told.
_options: dict[str, Any] = {}


def _group(name: str) -> GroupCoordinator:
    # A layer built on its own (a script, a test) is a group of one.
    if name not in _groups:
        _groups[name] = _alone(name)
    return _groups[name]


def _alone(name: str) -> GroupCoordinator:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return GroupCoordinator([[rank]], group_name=name)


def init_distributed_environment(
    world_size: int = -1,
    rank: int = -1,
    distributed_init_method: str = "env://",
    local_rank: int = -1,
    backend: str = "gloo",
    timeout: timedelta | None = None,
    cpu_timeout: timedelta | None = None,
) -> None:
    """Join the world of `world_size` ranks and wait for the others.

    backend      torch.distributed's, for the device's tensors
    timeout      of a collective on the device; `cpu_timeout` of one in main memory
    """
    backend = backend or "gloo"
    limits = {"timeout": timeout, "cpu_timeout": cpu_timeout or timeout}
    if world_size > 1 and not dist.is_initialized():
        limit = limits["cpu_timeout"] if backend == "gloo" else timeout
        join_world(distributed_init_method, backend, rank, world_size, limit)
    if backend == "gloo":
        limits["timeout"] = limits["cpu_timeout"]
    _options.update(local_rank=max(local_rank, 0), torch_distributed_backend=backend, **limits)
    _groups["world"] = _make("world", [range(max(world_size, 1))], use_device_communicator=False)


def _make(name: str, group_ranks: Sequence[Sequence[int]], **more: Any) -> GroupCoordinator:
    return GroupCoordinator(group_ranks, group_name=name, **{**_options, **more})


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1, pipeline_model_parallel_size: int = 1, **more: Any
) -> None:
    """Split the world into tensor-parallel groups of neighbours and pipelines across them.

    RuntimeError when the sizes do not make up the world.
    """
    tp, pp = tensor_model_parallel_size, pipeline_model_parallel_size
    world = get_world_group().world_size
    if tp * pp != world:
        raise RuntimeError(f"{tp} tensor-parallel times {pp} pipeline ranks are not the {world} ranks of the world")
    _groups["tp"] = _make("tp", [range(first, first + tp) for first in range(0, world, tp)])
    _groups["pp"] = _make("pp", [range(first, world, tp) for first in range(tp)])
    # Experts are split over the same ranks as everything else of a layer.
    _groups["ep"] = _groups["tp"]
    for name in ("dp", "pcp", "dcp"):
        _groups[name] = _alone(name)


def ensure_model_parallel_initialized(
    tensor_model_parallel_size: int = 1, pipeline_model_parallel_size: int = 1, **more: Any
) -> None:
    """Split the world unless it is split already; AssertionError when it is split otherwise."""
    if not model_parallel_is_initialized():
        initialize_model_parallel(tensor_model_parallel_size, pipeline_model_parallel_size, **more)
        return
    assert get_tp_group().world_size == tensor_model_parallel_size, "the tensor parallel size cannot change"
    assert get_pp_group().world_size == pipeline_model_parallel_size, "the pipeline parallel size cannot change"


def model_parallel_is_initialized() -> bool:
    """Whether the world is split into groups."""
    return "tp" in _groups and "pp" in _groups


def destroy_model_parallel() -> None:
    """Forget the groups."""
    for name in _GROUP_NAMES[1:]:
        group = _groups.pop(name, None)
        if group is not None:
            group.destroy()


def destroy_distributed_environment() -> None:
    """Leave the world."""
    _groups.pop("world", None)
    _options.clear()
    if dist.is_initialized():
        # A peer that has gone makes this fail, and nothing is lost by it.
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def get_world_group() -> GroupCoordinator:
    """All ranks."""
    return _group("world")


def get_tp_group() -> GroupCoordinator:
    """The ranks each layer is split over."""
    return _group("tp")


def get_pp_group() -> GroupCoordinator:
    """The ranks the stack of layers is split over."""
    return _group("pp")


def get_dp_group() -> GroupCoordinator:
    """The replicas."""
    return _group("dp")


def get_ep_group() -> GroupCoordinator:
    """The ranks experts are split over."""
    return _group("ep")


def get_tensor_model_parallel_world_size() -> int:
    """How many ranks each layer is split over."""
    return get_tp_group().world_size


def get_tensor_model_parallel_rank() -> int:
    """Which of them this is."""
    return get_tp_group().rank_in_group


def get_pipeline_model_parallel_world_size() -> int:
    """How many ranks the stack of layers is split over."""
    return get_pp_group().world_size


def get_pipeline_model_parallel_rank() -> int:
    """Which of them this is."""
    return get_pp_group().rank_in_group


def tensor_model_parallel_all_reduce(input_: torch.Tensor) -> torch.Tensor:
    """Sum over the ranks a layer is split over."""
    return get_tp_group().all_reduce(input_)


def tensor_model_parallel_all_gather(input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Concatenate the parts of the ranks a layer is split over."""
    return get_tp_group().all_gather(input_, dim)


def tensor_model_parallel_reduce_scatter(input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Sum over the ranks a layer is split over and keep this rank's part."""
    return get_tp_group().reduce_scatter(input_, dim)


def tensor_model_parallel_gather(input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
    """Concatenate on rank `dst` of the group; None elsewhere."""
    return get_tp_group().gather(input_, dst, dim)


def get_pp_indices(num_hidden_layers: int, pp_rank: int, pp_size: int) -> tuple[int, int]:
    """First layer of a pipeline stage and the one past its last. Raises ConfigError for a bad partition."""
    return stage_layers(num_hidden_layers, pp_rank, pp_size)


def divide(numerator: int, denominator: int) -> int:
    """An exact quotient; AssertionError when a size cannot be split evenly."""
    assert numerator % denominator == 0, f"{numerator} cannot be split into {denominator} equal parts"
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[torch.Tensor]:
    """Equal parts along the last dimension."""
    parts = torch.split(tensor, divide(tensor.size(-1), num_partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts
