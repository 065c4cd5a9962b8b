"""How the ranks of a group exchange tensors: one object per group, of a class that the platform names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class DeviceCommunicatorBase:
    """Exchanges tensors between the ranks of one group, by torch.distributed; subclasses do it faster.

    Built   once per group of several ranks, by each of them while it initialises its device, with keywords.
            `Platform.get_device_communicator_cls` names the class by its dotted path.
    Called  by the layers, in each step, by all ranks of the group in the same order, on one thread.
    Blocks  until the others have come to the same call.
    Fault   an error ends the step and with it the engine core; a rank that is missing must become an error.

    cpu_group      the group as torch.distributed's, for tensors in main memory
    device_group   the same for tensors on the device; the CPU group where the device is a processor
    unique_name    such as "tp:0"
    global_ranks, global_world_size  the group's world ranks and the number of ranks there are, if they are known

    Attributes: rank (of the world), ranks (the group's), rank_in_group, world_size (of the group). `dst` and
    `src` are indices in the group.
    """

    def __init__(
        self,
        cpu_group: Any,
        device: torch.device | None = None,
        device_group: Any = None,
        unique_name: str = "",
        global_ranks: Sequence[int] | None = None,
        global_world_size: int | None = None,
        use_all2all: bool = False,
    ) -> None:
        self.device = device or torch.device("cpu")
        self.cpu_group = cpu_group
        self.device_group = device_group or cpu_group
        self.unique_name = unique_name
        self.ranks = list(global_ranks or dist.get_process_group_ranks(cpu_group))
        self.rank = self.global_rank = dist.get_rank()
        self.world_size = len(self.ranks)
        self.global_world_size = global_world_size or dist.get_world_size()
        self.rank_in_group = self.ranks.index(self.rank)
        self.use_all2all = use_all2all

    def all_reduce(self, input_: Tensor) -> Tensor:
        """The sum over the group; `input_` may hold it too."""
        summed = input_.contiguous()
        dist.all_reduce(summed, group=self.device_group)
        return summed

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """The members' tensors, all of one shape, one after the other along `dim`."""
        parts = torch.empty((self.world_size, *input_.shape), dtype=input_.dtype, device=input_.device)
        dist.all_gather(list(parts.unbind(0)), input_.contiguous(), group=self.device_group)
        return torch.cat(parts.unbind(0), dim=dim)

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        """This member's part along `dim` of the sum; AssertionError when it cannot be cut evenly."""
        assert input_.size(dim) % self.world_size == 0, f"{input_.size(dim)} is not {self.world_size} equal parts"
        parts = [part.contiguous() for part in input_.chunk(self.world_size, dim)]
        own = torch.empty_like(parts[self.rank_in_group])
        dist.reduce_scatter(own, parts, group=self.device_group)
        return own

    def gather(self, input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        """As `all_gather`, on member `dst`; None on the others."""
        here = self.rank_in_group == dst
        parts = [torch.empty_like(input_) for _ in range(self.world_size)] if here else None
        dist.gather(input_.contiguous(), parts, dst=self.ranks[dst], group=self.device_group)
        return None if parts is None else torch.cat(parts, dim=dim)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """The tensor of member `src`, written into `tensor`."""
        dist.broadcast(tensor, self.ranks[src], group=self.device_group)
        return tensor

    def send(self, tensor: Tensor, dst: int | None = None) -> None:
        """Send to member `dst`; the next one unless given."""
        dist.send(tensor.contiguous(), self._peer(dst, 1), group=self.device_group)

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> Tensor:
        """Receive a tensor of this shape and type from member `src`; the one before unless given."""
        tensor = torch.empty(size, dtype=dtype, device=self.device)
        dist.recv(tensor, self._peer(src, -1), group=self.device_group)
        return tensor

    def _peer(self, member: int | None, step: int) -> int:
        return self.ranks[(self.rank_in_group + step) % self.world_size if member is None else member]

    def prepare_communication_buffer_for_model(self, model: torch.nn.Module) -> None:
        """Make buffers that depend on the model; called once it is loaded."""

    def dispatch(self, hidden_states: Tensor, router_logits: Tensor, is_sequence_parallel: bool = False) -> Any:
        """Spread tokens over the ranks' experts; here every rank keeps its own."""
        return hidden_states, router_logits

    def combine(self, hidden_states: Tensor, is_sequence_parallel: bool = False) -> Tensor:
        """Undo `dispatch`."""
        return hidden_states

    def destroy(self) -> None:
        """Let go of what the group holds; called once, at the end."""
