"""The groups of ranks a model is split over, and what they exchange.

Layers ask for their rank and group size here and never assume that they are alone; with one rank
every exchange is the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hardpoint.errors import ConfigError


class GroupCoordinator:
    """Ranks that work together, seen from one of them.

    rank           this rank in the world     rank_in_group  its index in `ranks`
    ranks          all ranks of the group
    """

    def __init__(self, ranks: Sequence[int], rank: int, name: str = "") -> None:
        if len(ranks) != 1:
            raise ConfigError(
                f"a {name or 'parallel'} group of {len(ranks)} ranks is not supported yet",
                code="parallel-size",
                fix="use a tensor, pipeline and data parallel size of 1",
            )
        self.unique_name = name
        self.ranks = list(ranks)
        self.rank = rank
        self.local_rank = rank
        self.world_size = len(ranks)
        self.rank_in_group = self.ranks.index(rank)

    @property
    def first_rank(self) -> int:
        """World rank of the group's first member."""
        return self.ranks[0]

    @property
    def last_rank(self) -> int:
        """World rank of the group's last member."""
        return self.ranks[-1]

    @property
    def is_first_rank(self) -> bool:
        """Whether this is the group's first member."""
        return self.rank == self.first_rank

    @property
    def is_last_rank(self) -> bool:
        """Whether this is the group's last member."""
        return self.rank == self.last_rank

    @property
    def next_rank(self) -> int:
        """World rank of the member after this one, round the ring."""
        return self.ranks[(self.rank_in_group + 1) % self.world_size]

    @property
    def prev_rank(self) -> int:
        """World rank of the member before this one, round the ring."""
        return self.ranks[(self.rank_in_group - 1) % self.world_size]

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Sum over the group."""
        return input_

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the members' tensors along `dim`."""
        return input_

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Sum over the group and keep this member's part along `dim`."""
        return input_

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Concatenate on member `dst`; None on the others."""
        return input_

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        """The tensor of member `src`."""
        return input_

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """The object of member `src`."""
        return obj

    def broadcast_tensor_dict(self, tensor_dict: dict[str, Any] | None = None, src: int = 0) -> dict[str, Any] | None:
        """The tensors of member `src`."""
        return tensor_dict

    def barrier(self) -> None:
        """Wait for all members."""


_GROUP_NAMES = ("world", "tp", "pp", "dp", "ep", "pcp", "dcp")
_groups: dict[str, GroupCoordinator] = {}


def _group(name: str) -> GroupCoordinator:
    # A layer built on its own (a script, a test) is a group of one.
    if name not in _groups:
        _groups[name] = GroupCoordinator([0], 0, name)
    return _groups[name]


def init_distributed_environment(
    world_size: int = -1,
    rank: int = -1,
    distributed_init_method: str = "env://",
    local_rank: int = -1,
    backend: str = "gloo",
    timeout: Any = None,
) -> None:
    """Join the world of `world_size` ranks; ConfigError for what is not supported."""
    _groups["world"] = GroupCoordinator(range(max(world_size, 1)), max(rank, 0), "world")


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1, pipeline_model_parallel_size: int = 1, **more: Any
) -> None:
    """Split the world into groups; ConfigError for what is not supported."""
    sizes = {"tp": tensor_model_parallel_size, "pp": pipeline_model_parallel_size}
    for name in _GROUP_NAMES[1:]:
        _groups[name] = GroupCoordinator(range(sizes.get(name, 1)), 0, name)


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
        _groups.pop(name, None)


def destroy_distributed_environment() -> None:
    """Leave the world."""
    _groups.pop("world", None)


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
