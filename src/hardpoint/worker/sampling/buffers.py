"""Buffers with a host and a device side, under the names slot-keyed logits processors know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class SharedArray:
    """A host array and its tensor; on a CPU both are the same memory.

    np   the array      gpu  a tensor of its contents on `device`, to be read only
    """

    def __init__(self, array: np.ndarray, device: torch.device) -> None:
        self.np = array
        self.cpu = torch.from_numpy(array)
        self._device = device

    @property
    def gpu(self) -> Tensor:
        """The contents on the device."""
        return self.cpu.to(self._device)


class UvaBackedTensor(SharedArray):
    """A zeroed `SharedArray` of its own."""

    def __init__(self, size: int | Sequence[int], dtype: torch.dtype, device: Any = "cpu") -> None:
        super().__init__(torch.zeros(size, dtype=dtype).numpy(), torch.device(device))


class StagedWriteTensor:
    """A device tensor whose writes are collected on the host and made together.

    size  of the tensor: [rows] or [rows, columns]
    """

    def __init__(self, size: int | Sequence[int], dtype: torch.dtype, device: Any, **_unused: Any) -> None:
        self.gpu = torch.zeros(size, dtype=dtype, device=device)
        self._staged: list[tuple[int, int, list[Any]]] = []

    def stage_write(self, index: int, start: int, x: Iterable[Any]) -> None:
        """Write `x` into row `index` from column `start` on, at the next `apply_write`."""
        self._staged.append((index, start, list(x)))

    def stage_write_elem(self, index: int, x: Any) -> None:
        """Write one element of a one-dimensional tensor, at the next `apply_write`."""
        self._staged.append((index, 0, [x]))

    def apply_write(self) -> None:
        """Make the collected writes, in order."""
        for index, start, values in self._staged:
            if self.gpu.dim() == 1:
                self.gpu[index + start : index + start + len(values)] = torch.tensor(values, dtype=self.gpu.dtype)
            else:
                self.gpu[index, start : start + len(values)] = torch.tensor(values, dtype=self.gpu.dtype)
        self._staged.clear()

    def clear_staged_writes(self) -> None:
        """Forget the collected writes."""
        self._staged.clear()
