"""The built-in communicators: gloo on processors, nccl on NVIDIA devices."""

from __future__ import annotations

from torch import Tensor

from hardpoint.contracts.device_communicator import DeviceCommunicatorBase


class CpuCommunicator(DeviceCommunicatorBase):
    """Processors. Gloo sums in place and in the same order on every rank, so all ranks get the same bits."""

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        """This member's part along `dim` of the sum, which gloo has no call for."""
        assert input_.size(dim) % self.world_size == 0, f"{input_.size(dim)} is not {self.world_size} equal parts"
        return self.all_reduce(input_.clone()).chunk(self.world_size, dim)[self.rank_in_group].contiguous()


class CudaCommunicator(DeviceCommunicatorBase):
    """NVIDIA devices, through nccl. Written where there was one device only: not verified with several."""
