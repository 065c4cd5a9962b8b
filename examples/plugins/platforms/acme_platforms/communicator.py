"""How ranks exchange tensors: as torch does, except that sums are made in the order of the ranks."""

from typing import Any

from torch import Tensor

from hardpoint.contracts.device_communicator import DeviceCommunicatorBase


class AcmeDeviceCommunicator(DeviceCommunicatorBase):
    """One object for each group of several ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.summed = 0

    def all_reduce(self, input_: Tensor) -> Tensor:
        """The sum over the group."""
        self.summed += 1
        return self.all_gather(input_.unsqueeze(0), dim=0).sum(0)
