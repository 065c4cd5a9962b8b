"""Tensors that are still in their file: reading one into a parameter decodes it straight there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_map

# Numbers decoded at a time: small enough to stay in a processor's cache.
_TILE = 1 << 18

# ([rows, bytes] uint8) -> [rows, numbers] float32
Decode = Callable[[torch.Tensor], torch.Tensor]

# Storage type, numbers in a block, bytes of a block.
Block = tuple[int, int, int]

# What may be asked without decoding.
TENSOR_FACTS = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.ndimension,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.__len__,
    *(
        getattr(torch.Tensor, name).__get__
        for name in (
            "shape",
            "dtype",
            "ndim",
            "layout",
            "requires_grad",
            "itemsize",
            "nbytes",
            "is_sparse",
            "is_quantized",
        )
    ),
}


class StoredTensor(torch.Tensor):
    """A matrix (or vector) in a mapped file, in whatever form `decode` understands.

    It looks like a float32 tensor. Cutting rows or columns off stays lazy, copying it into a tensor
    decodes tile by tile into that tensor, and anything else works on the decoded numbers.

    raw        [rows, bytes] the stored rows
    order      row i of the tensor is stored row order[i]; None = as stored
    block      (storage type, numbers in a block, bytes of a block), where the numbers come in blocks
    """

    _raw: npt.NDArray[np.uint8]
    _decode: Decode
    _order: npt.NDArray[np.int64] | None
    _rows: range
    _columns: range
    _block: Block | None

    def __new__(
        cls,
        raw: npt.NDArray[np.uint8],
        shape: tuple[int, ...],
        decode: Decode,
        order: npt.NDArray[np.int64] | None = None,
        block: Block | None = None,
    ) -> StoredTensor:
        """A stored tensor of one or two dimensions; `shape` is that of the decoded numbers."""
        assert len(shape) == 1 or shape[0] == raw.shape[0], "the stored rows do not match the shape"
        whole = cls._window(raw, decode, order, range(raw.shape[0]), range(shape[-1]), len(shape))
        whole._block = block
        return whole

    @classmethod
    def _window(
        cls,
        raw: npt.NDArray[np.uint8],
        decode: Decode,
        order: npt.NDArray[np.int64] | None,
        rows: range,
        columns: range,
        dims: int,
    ) -> StoredTensor:
        shape = (len(columns),) if dims == 1 else (len(rows), len(columns))
        # A tensor without memory: the numbers do not exist yet.
        self = torch.Tensor._make_subclass(cls, torch.empty(shape, dtype=torch.float32, device="meta"))
        self._raw, self._decode, self._order, self._rows, self._columns = raw, decode, order, rows, columns
        self._block = None
        return self

    def cut(self, dim: int, start: int, end: int) -> StoredTensor:
        """Elements `start` to `end` of dimension `dim`, still in the file."""
        by_rows = self.dim() == 2 and dim % 2 == 0
        rows = self._rows[start:end] if by_rows else self._rows
        columns = self._columns if by_rows else self._columns[start:end]
        part = self._window(self._raw, self._decode, self._order, rows, columns, self.dim())
        part._block = self._block
        return part

    @property
    def block_size(self) -> int:
        """Numbers in a block along a row; 1 where each stands for itself."""
        return 1 if self._block is None else self._block[1]

    def stored_rows(self) -> tuple[npt.NDArray[np.uint8], int, npt.NDArray[np.int64] | None] | None:
        """The bytes of the rows and their storage type, and where in them the tensor's rows are (None = in order).

        None when the tensor's columns are not whole blocks.
        """
        if self._block is None:
            return None
        kind, numbers, size = self._block
        start, stop = self._columns.start, self._columns.stop
        if start % numbers or stop % numbers:
            return None
        raw = self._raw[:, start // numbers * size : stop // numbers * size]
        if self._order is None:
            return raw[self._rows.start : self._rows.stop], kind, None
        return raw, kind, self._order[self._rows.start : self._rows.stop]

    def read_into(self, target: torch.Tensor) -> None:
        """Decode into a tensor of the same shape; RuntimeError when it has another."""
        if target.shape != self.shape:
            raise RuntimeError(f"cannot copy shape {tuple(self.shape)} into {tuple(target.shape)}")
        matrix = target.unsqueeze(0) if self.dim() == 1 else target
        columns = slice(self._columns.start, self._columns.stop)
        step = max(1, _TILE // max(1, len(self._columns)))
        for start in range(0, len(self._rows), step):
            part = self._rows[start : start + step]
            stored = slice(part.start, part.stop) if self._order is None else self._order[part.start : part.stop]
            # The copy also makes the bytes writable, which torch insists on.
            tile = self._decode(torch.from_numpy(np.array(self._raw[stored])))
            matrix[start : start + len(part)].copy_(tile[:, columns])

    def numbers(self) -> torch.Tensor:
        """The decoded tensor."""
        out = torch.empty(self.shape, dtype=torch.float32)
        self.read_into(out)
        return out

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Keep slices lazy and copies direct; decode for everything else."""
        kwargs = kwargs or {}
        if func in TENSOR_FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func == torch.Tensor.device.__get__:
            return torch.device("cpu")
        if func is torch.Tensor.copy_ and not isinstance(args[0], cls) and args[0].shape == args[1].shape:
            args[1].read_into(args[0])
            return args[0]
        lazy = _lazily(func, args) if isinstance(args[0], cls) and not kwargs else None
        if lazy is not None:
            return lazy
        args, kwargs = tree_map(lambda value: value.numbers() if isinstance(value, cls) else value, (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredTensor(shape={tuple(self.shape)})"


def _lazily(func: Any, args: tuple[Any, ...]) -> StoredTensor | None:
    """What narrowing or slicing gives, still in the file; None for other calls."""
    tensor: StoredTensor = args[0]
    if func in (torch.Tensor.narrow, torch.narrow):
        _, dim, start, length = args
        if isinstance(start, int) and 0 <= start <= start + length <= tensor.size(dim):
            return tensor.cut(dim, start, start + length)
    if func is torch.Tensor.__getitem__ and isinstance(args[1], slice) and args[1].step in (None, 1):
        return tensor.cut(0, *args[1].indices(tensor.size(0))[:2])
    if func in (torch.Tensor.detach, torch.Tensor.contiguous, torch.Tensor.cpu):
        return tensor.cut(0, 0, tensor.size(0))
    return None
