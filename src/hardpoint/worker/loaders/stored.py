"""Tensors that are still in their file: reading one into a parameter decodes it straight there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_map

# Numbers decoded at a time: small enough to stay in a processor's cache.
_TILE = 1 << 18

# ([rows, bytes] uint8) -> [rows, numbers] float32
Decode = Callable[[torch.Tensor], torch.Tensor]
aten = torch.ops.aten


class StoredTensor(torch.Tensor):
    """A matrix (or vector) in a mapped file, in whatever form `decode` understands.

    It looks like a float32 tensor. Cutting rows or columns off stays lazy, copying it into a tensor
    decodes tile by tile into that tensor, and anything else works on the decoded numbers.

    raw        [rows, bytes] the stored rows
    order      row i of the tensor is stored row order[i]; None = as stored
    """

    _raw: npt.NDArray[np.uint8]
    _decode: Decode
    _order: npt.NDArray[np.int64] | None
    _rows: range
    _columns: range

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(
        cls,
        raw: npt.NDArray[np.uint8],
        shape: tuple[int, ...],
        decode: Decode,
        order: npt.NDArray[np.int64] | None = None,
    ) -> StoredTensor:
        """A stored tensor of one or two dimensions; `shape` is that of the decoded numbers."""
        self = cls._window(raw, decode, order, range(raw.shape[0]), range(shape[-1]), len(shape))
        assert tuple(self.shape) == tuple(shape), "the stored rows do not match the shape"
        return self

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
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)
        self._raw, self._decode, self._order, self._rows, self._columns = raw, decode, order, rows, columns
        return self

    def cut(self, dim: int, start: int, end: int) -> StoredTensor:
        """Elements `start` to `end` of dimension `dim`, still in the file."""
        by_rows = self.dim() == 2 and dim == 0
        rows = self._rows[start:end] if by_rows else self._rows
        columns = self._columns if by_rows else self._columns[start:end]
        return self._window(self._raw, self._decode, self._order, rows, columns, self.dim())

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
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Keep slices lazy and copies direct; decode for everything else."""
        first: Any = args[0] if args else None
        if func is aten.copy_.default and not isinstance(first, cls) and first.shape == args[1].shape:
            args[1].read_into(first)
            return first
        if func is aten.slice.Tensor and isinstance(first, cls):
            dim, start, end, step = (*args[1:], *(0, None, None, 1)[len(args) - 1 :])  # type: ignore[misc]
            if step == 1:
                return first.cut(dim % first.dim(), *slice(start, end).indices(first.size(dim))[:2])
        if func in (aten.detach.default, aten.alias.default) and isinstance(first, cls):
            return first.cut(0, 0, first.size(0))
        args, kwargs = tree_map(
            lambda value: value.numbers() if isinstance(value, cls) else value, (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredTensor(shape={tuple(self.shape)})"
