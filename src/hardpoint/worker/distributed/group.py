"""One group of ranks, seen from one of them: who is in it, and what they exchange."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hardpoint import platforms
from hardpoint.contracts.device_communicator import DeviceCommunicatorBase
from hardpoint.extensions.refs import resolve_obj_by_qualname
from hardpoint.links.codec import pack, unpack

# What stands in a message for a tensor that follows it.
_TENSOR = "tensor"
_VALUE = "value"

TensorDict = dict[str, Any]


class _OneRank:
    """Answers for the process group of a rank that is alone, which has none."""

    def size(self) -> int:
        """One."""
        return 1

    def rank(self) -> int:
        """The first."""
        return 0


class GroupCoordinator:
    """Ranks that work together, seen from one of them. With one rank every exchange is the identity.

    group_ranks                the world's ranks, split into such groups; every rank of the world makes all of them
    local_rank                 this rank's device
    torch_distributed_backend  of the device's tensors, such as "gloo" or "nccl"
    use_device_communicator    whether tensors go through the platform's communicator
    timeout, cpu_timeout       of a collective, on the device and in main memory

    rank           this rank in the world     rank_in_group  its index in `ranks`
    ranks          all ranks of the group     world_size     how many they are
    """

    device_communicator: DeviceCommunicatorBase | None

    def __init__(
        self,
        group_ranks: Sequence[Sequence[int]],
        local_rank: int = 0,
        torch_distributed_backend: str = "gloo",
        use_device_communicator: bool = True,
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
        *,
        timeout: timedelta | None = None,
        cpu_timeout: timedelta | None = None,
    ) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.local_rank = local_rank
        self.unique_name = f"{group_name or 'group'}:0"
        self.ranks = list(next(ranks for ranks in group_ranks if self.rank in ranks))
        self.world_size = len(self.ranks)
        self.rank_in_group = self.ranks.index(self.rank)
        self.cpu_group: Any = None
        self.device_group: Any = None
        self.device_communicator = None
        self._sending: list[Any] = []
        if self.world_size == 1:
            self.cpu_group = self.device_group = _OneRank()
            return
        self._make_groups(group_ranks, torch_distributed_backend, timeout, cpu_timeout)
        self._device = _device(local_rank)
        if use_device_communicator:
            self.device_communicator = self._make_communicator()

    def _make_groups(
        self,
        group_ranks: Sequence[Sequence[int]],
        backend: str,
        timeout: timedelta | None,
        cpu_timeout: timedelta | None,
    ) -> None:
        for ranks in group_ranks:
            group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
            cpu_group = group if backend == "gloo" else dist.new_group(list(ranks), timeout=cpu_timeout, backend="gloo")
            if self.rank in ranks:
                self.device_group, self.cpu_group = group, cpu_group

    def _make_communicator(self) -> DeviceCommunicatorBase:
        communicator_class = resolve_obj_by_qualname(platforms.current_platform.get_device_communicator_cls())
        return communicator_class(
            cpu_group=self.cpu_group,
            device=self._device,
            device_group=self.device_group,
            unique_name=self.unique_name,
        )

    # Who is who.

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

    # Tensors of the device, through its communicator.

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Sum over the group; `input_` may hold it too."""
        return input_ if self.world_size == 1 else self._communicator().all_reduce(input_)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the members' tensors along `dim`."""
        return input_ if self.world_size == 1 else self._communicator().all_gather(input_, dim)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Sum over the group and keep this member's part along `dim`."""
        return input_ if self.world_size == 1 else self._communicator().reduce_scatter(input_, dim)

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Concatenate on member `dst`; None on the others."""
        return input_ if self.world_size == 1 else self._communicator().gather(input_, dst, dim)

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        """The tensor of member `src`."""
        return input_ if self.world_size == 1 else self._communicator().broadcast(input_, src)

    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        """Send to member `dst`; the next one unless given."""
        self._communicator().send(tensor, dst)

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> torch.Tensor:
        """Receive a tensor of this shape and type from member `src`; the one before unless given."""
        return self._communicator().recv(size, dtype, src)

    def _communicator(self) -> DeviceCommunicatorBase:
        if self.device_communicator is None:
            raise RuntimeError(f"the group {self.unique_name} has no device communicator")
        return self.device_communicator

    # Plain data, in main memory: never pickled.

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """The object of member `src`: numbers, text, containers, arrays."""
        if self.world_size == 1:
            return obj
        data = _as_bytes(obj) if self.rank_in_group == src else None
        size = torch.tensor([0 if data is None else len(data)])
        dist.broadcast(size, self.ranks[src], group=self.cpu_group)
        buffer = torch.empty(int(size), dtype=torch.uint8) if data is None else data
        dist.broadcast(buffer, self.ranks[src], group=self.cpu_group)
        return obj if data is not None else unpack(buffer.numpy())

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every member's object, in the order of the group."""
        return [self.broadcast_object(obj, src) for src in range(self.world_size)]

    def send_object(self, obj: Any, dst: int) -> None:
        """Send plain data to member `dst`."""
        for tensor in _framed(obj):
            dist.send(tensor, self.ranks[dst], group=self.cpu_group)

    def recv_object(self, src: int) -> Any:
        """Receive what member `src` sends by `send_object`."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, self.ranks[src], group=self.cpu_group)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(buffer, self.ranks[src], group=self.cpu_group)
        return unpack(buffer.numpy())

    # Tensors by name.

    def broadcast_tensor_dict(self, tensor_dict: TensorDict | None = None, src: int = 0) -> TensorDict | None:
        """The dict of member `src`: tensors and plain data by name."""
        if self.world_size == 1:
            return tensor_dict
        here = self.rank_in_group == src
        if here:
            assert tensor_dict is not None, "the member that broadcasts has nothing"
        facts = self.broadcast_object(_facts(tensor_dict or {}) if here else None, src)
        result: TensorDict = {}
        for name, (kind, value) in facts.items():
            if kind == _VALUE:
                result[name] = value
                continue
            tensor = tensor_dict[name].contiguous() if here and tensor_dict else self._empty(value)
            dist.broadcast(tensor, self.ranks[src], group=self._group_of(tensor))
            result[name] = tensor
        return result

    def send_tensor_dict(self, tensor_dict: TensorDict, dst: int | None = None) -> None:
        """Send tensors and plain data by name to member `dst`, the next one unless given.

        Returns before they are received; the next call waits for that.
        """
        for work, _ in self._sending:
            work.wait()
        target = self.next_rank if dst is None else self.ranks[dst]
        tensors = _framed(_facts(tensor_dict))
        tensors += [value.contiguous() for value in tensor_dict.values() if isinstance(value, torch.Tensor)]
        # The tensors must live until they are received.
        self._sending = [(dist.isend(tensor, target, group=self._group_of(tensor)), tensor) for tensor in tensors]

    def recv_tensor_dict(self, src: int | None = None) -> TensorDict:
        """Receive what member `src`, the one before unless given, sends by `send_tensor_dict`."""
        member = (self.rank_in_group - 1) % self.world_size if src is None else src
        result: TensorDict = {}
        for name, (kind, value) in self.recv_object(member).items():
            if kind == _TENSOR:
                value = self._empty(value)
                dist.recv(value, self.ranks[member], group=self._group_of(value))
            result[name] = value
        return result

    def _empty(self, facts: Sequence[Any]) -> torch.Tensor:
        dtype, shape, in_main_memory = facts
        device = torch.device("cpu") if in_main_memory else self._device
        return torch.empty(shape, dtype=getattr(torch, dtype), device=device)

    def _group_of(self, tensor: torch.Tensor) -> Any:
        return self.cpu_group if tensor.device.type == "cpu" else self.device_group

    def barrier(self) -> None:
        """Wait for all members."""
        if self.world_size > 1:
            dist.barrier(group=self.cpu_group)

    def destroy(self) -> None:
        """Let go of the communicator; torch's groups end with the world."""
        if self.device_communicator is not None:
            self.device_communicator.destroy()
            self.device_communicator = None
        self._sending.clear()


def _device(local_rank: int) -> torch.device:
    kind = platforms.current_platform.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, local_rank)


def _facts(tensor_dict: TensorDict) -> dict[str, list[Any]]:
    return {name: _fact(value) for name, value in tensor_dict.items()}


def _fact(value: Any) -> list[Any]:
    if not isinstance(value, torch.Tensor):
        return [_VALUE, value]
    dtype = str(value.dtype).removeprefix("torch.")
    return [_TENSOR, [dtype, list(value.shape), value.device.type == "cpu"]]


def _framed(obj: Any) -> list[torch.Tensor]:
    data = _as_bytes(obj)
    return [torch.tensor([len(data)]), data]


def _as_bytes(obj: Any) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(pack(obj)), np.uint8))
