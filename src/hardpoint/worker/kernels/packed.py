"""Weights that stay quantised: packed while they are loaded, computed with by the kernels."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from hardpoint.config.gguf_file import GGMLType
from hardpoint.log import init_logger
from hardpoint.worker.kernels.arena import ARENA
from hardpoint.worker.kernels.library import Library, Linear, Matrix
from hardpoint.worker.layers.parameters import check_shape, check_size, shard_of
from hardpoint.worker.loaders.stored import TENSOR_FACTS, StoredTensor

logger = init_logger(__name__)
# Products from which on other Python threads are let run meanwhile.
_LONG = 1 << 25


class PackedMatrix:
    """Some rows of a weight in the kernels' form. `buffer` holds the bytes."""

    def __init__(self, library: Library, kind: GGMLType, rows: int, columns: int) -> None:
        size = library.packed_bytes(kind, rows, columns)
        if size < 0:
            raise ValueError(f"rows of {columns} numbers cannot be packed as {kind.name}")
        self.library, self.kind, self.rows, self.columns = library, kind, rows, columns
        self.buffer = ARENA.allocate(size)

    @classmethod
    def of(cls, library: Library, tensor: torch.Tensor) -> PackedMatrix:
        """Pack a matrix: as it is stored if it still is in a GGUF file, else as float32."""
        rows, columns = tensor.shape
        stored = tensor.stored_rows() if isinstance(tensor, StoredTensor) else None
        if stored is not None:
            raw, kind, order = stored
            packed = cls(library, GGMLType(kind), rows, columns)
            packed._fill(raw, order)
            return packed
        packed = cls(library, GGMLType.F32, rows, columns)
        packed._fill(np.ascontiguousarray(torch.Tensor.numpy(_plain(tensor))).view(np.uint8), None)
        return packed

    @classmethod
    def zeros(cls, library: Library, rows: int, columns: int) -> PackedMatrix:
        """A matrix of zeros."""
        packed = cls(library, GGMLType.F16, rows, columns)
        packed.buffer.zero_()
        return packed

    def _fill(self, raw: Any, order: Any) -> None:
        order = None if order is None else np.ascontiguousarray(order, dtype=np.int64)
        places = None if order is None else order.ctypes.data
        self.library.pack(
            self.kind, raw.ctypes.data, raw.strides[0], places, self.rows, self.columns, self.buffer.data_ptr()
        )

    def described(self) -> Matrix:
        """What the kernels are told; valid as long as this object."""
        return Matrix(int(self.kind), 0, self.rows, self.buffer.data_ptr())

    def look_up(self, rows: torch.Tensor) -> torch.Tensor:
        """[n] row numbers -> [n, columns] float32; IndexError for what is not a row."""
        rows = rows.to(torch.int64).contiguous()
        out = torch.empty((len(rows), self.columns), dtype=torch.float32)
        matrix = self.described()
        places = (ctypes.addressof(matrix), self.columns, rows.data_ptr(), len(rows), out.data_ptr())
        if self.library.lookup(*places):
            raise IndexError(f"row numbers are out of range: there are {self.rows} rows")
        return out


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    numbers = tensor.numbers() if isinstance(tensor, StoredTensor) else tensor
    return numbers.detach().to(torch.float32).contiguous()


class PackedLinear:
    """Matrices over the same input, their outputs side by side, computed in one call."""

    def __init__(self, matrices: list[PackedMatrix]) -> None:
        self.matrices = matrices
        self.columns = matrices[0].columns
        self.outputs = sum(matrix.rows for matrix in matrices)
        self._products = self.columns * self.outputs
        self._described = (Matrix * len(matrices))(*(matrix.described() for matrix in matrices))
        self._layer = Linear(self.columns, len(matrices), self._described)
        self._place = ctypes.addressof(self._layer)
        self._short, self._long = matrices[0].library.linear, matrices[0].library.linear_long

    @property
    def place(self) -> int:
        """Address of the layer's description, for programs; valid as long as this object."""
        return self._place

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., columns] -> [..., outputs] float32; ValueError when sizes do not fit."""
        columns, outputs = self.columns, self.outputs
        if x.shape[-1] != columns:
            raise ValueError(f"the input has {x.shape[-1]} numbers a token, the layer wants {columns}")
        if x.dtype is not torch.float32 or x.stride(-1) != 1 or (x.dim() != 2 and not x.is_contiguous()):
            x = x.to(torch.float32).contiguous()
        added = None
        if bias is not None:
            if bias.dtype is not torch.float32 or bias.shape != (outputs,) or not bias.is_contiguous():
                raise ValueError(f"the bias is not {outputs} float32 numbers")
            added = bias.data_ptr()
        tokens = x.numel() // columns
        stride = x.stride(0) if x.dim() == 2 else columns
        out = torch.empty((*x.shape[:-1], outputs), dtype=torch.float32)
        call = self._short if tokens * self._products < _LONG else self._long
        call(self._place, x.data_ptr(), stride, tokens, out.data_ptr(), outputs, added)
        return out

    def look_up(self, rows: torch.Tensor) -> torch.Tensor:
        """[...] row numbers -> [..., columns] float32; IndexError for what is not a row."""
        flat = rows.reshape(-1)
        if len(self.matrices) == 1:
            return self.matrices[0].look_up(flat).view(*rows.shape, self.columns)
        out = torch.empty((len(flat), self.columns), dtype=torch.float32)
        start = 0
        for matrix in self.matrices:
            here = (flat >= start) & (flat < start + matrix.rows)
            out[here] = matrix.look_up(flat[here] - start)
            start += matrix.rows
        if len(flat) and (flat.min() < 0 or flat.max() >= start):
            raise IndexError(f"row numbers are out of range: there are {start} rows")
        return out.view(*rows.shape, self.columns)

    def numbers(self) -> torch.Tensor:
        """[outputs, columns] float32: what the kernels compute with."""
        return torch.cat([matrix.look_up(torch.arange(matrix.rows)) for matrix in self.matrices])


def _tell_cut_blocks(columns: int, block: int, ranks: int) -> None:
    """Say that a rank's columns are not whole blocks, and for how many ranks they would be."""
    fitting = [str(size) for size in range(1, 4 * ranks + 1) if columns % (size * block) == 0]
    logger.warning_once(
        "rows of %d numbers in blocks of %d are not cut between blocks by %d ranks: these weights are kept as float32, "
        "which takes more memory and time; with %s rank(s) they stay as stored",
        columns,
        block,
        ranks,
        ", ".join(fitting) or "no number of",
    )


_FACTS = TENSOR_FACTS | {
    getattr(torch.Tensor, name).__get__
    for name in ("grad_fn", "is_leaf", "grad", "names")
    if hasattr(torch.Tensor, name)
}


_LOADING = (torch.Tensor.copy_, torch.Tensor.data.__set__)  # type: ignore[attr-defined]

_CHANGING = {"__setitem__"} | {
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}


def _changes_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in _CHANGING
    return name.endswith("_") and name != "requires_grad_"


class PackedWeight(nn.Parameter):
    """A parameter whose numbers exist only packed.

    To whom reads it, it is a float32 matrix [outputs, inputs]: any operation works on the unpacked numbers,
    so that a layer of somebody else computes the same, only slower.

    tp_rank, tp_size  the part of the checkpoint's tensors that is kept here
    """

    _library: Library
    _matrices: dict[int, PackedMatrix]
    _sealed: PackedLinear | None
    tp_rank: int
    tp_size: int

    def __new__(cls, library: Library, rows: int, columns: int, tp_rank: int = 0, tp_size: int = 1) -> PackedWeight:
        """A weight that is still to be loaded."""
        self = torch.Tensor._make_subclass(cls, torch.empty((rows, columns), dtype=torch.float32, device="meta"))
        self._library, self._matrices, self._sealed = library, {}, None
        self.tp_rank, self.tp_size = tp_rank, tp_size
        return self

    def place(self, first_row: int, tensor: torch.Tensor) -> None:
        """Take a matrix for the rows from `first_row` on; ValueError when it does not fit."""
        if tensor.dim() != 2 or tensor.shape[1] != self.shape[1] or first_row + tensor.shape[0] > self.shape[0]:
            raise ValueError(f"its shape is {tuple(tensor.shape)}, the model has {tuple(self.shape)}")
        self._matrices[first_row] = PackedMatrix.of(self._library, tensor)
        self._sealed = None

    def place_zeros(self, first_row: int) -> None:
        """Fill the rows from `first_row` on with zeros."""
        if first_row < self.shape[0]:
            self._matrices[first_row] = PackedMatrix.zeros(self._library, self.shape[0] - first_row, self.shape[1])
            self._sealed = None

    def packed(self) -> PackedLinear:
        """What the layer computes with; ValueError while rows are missing."""
        if self._sealed is None:
            row = 0
            for start, matrix in sorted(self._matrices.items()):
                if start != row:
                    break
                row += matrix.rows
            if row != self.shape[0]:
                raise ValueError(f"rows from {row} on of a weight {tuple(self.shape)} were not loaded")
            self._sealed = PackedLinear([matrix for _, matrix in sorted(self._matrices.items())])
        return self._sealed

    def load_column_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        """Take this rank's outputs."""
        rows = self.shape[0]
        check_size(loaded_weight, 0, rows * self.tp_size)
        self.place(0, shard_of(loaded_weight, 0, rows, self.tp_rank))

    def load_row_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        """Take this rank's inputs."""
        columns = self.shape[1]
        check_size(loaded_weight, 1, columns * self.tp_size)
        if isinstance(loaded_weight, StoredTensor) and columns % loaded_weight.block_size:
            _tell_cut_blocks(columns * self.tp_size, loaded_weight.block_size, self.tp_size)
        self.place(0, shard_of(loaded_weight, 1, columns, self.tp_rank))

    def load_merged_column_weight(self, loaded_weight: torch.Tensor, **shard: Any) -> None:
        """Take this rank's outputs of one part of a fused layer."""
        size, rank = shard["shard_size"], shard["tp_rank"]
        check_size(loaded_weight, 0, size * self.tp_size)
        self.place(shard["shard_offset"], shard_of(loaded_weight, 0, size, rank))

    def load_qkv_weight(self, loaded_weight: torch.Tensor, **shard: Any) -> None:
        """Take this rank's heads of the queries, keys or values; `num_heads` ranks share a key/value head."""
        size, sharing = shard["shard_size"], 1 if shard["shard_id"] == "q" else shard["num_heads"]
        check_size(loaded_weight, 0, size * self.tp_size // sharing)
        self.place(shard["shard_offset"], shard_of(loaded_weight, 0, size, shard["tp_rank"] // sharing))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer questions about shape and type, load by `copy_`; unpack for everything else."""
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func == torch.Tensor.device.__get__:
            return torch.device("cpu")
        if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0]
        if func in _LOADING and isinstance(args[0], cls):
            check_shape(args[0], args[1])
            args[0].place(0, args[1])
            return args[0]
        if _changes_in_place(func) and args and isinstance(args[0], cls):
            raise TypeError(
                f"{func.__name__} cannot change a quantised weight in place: give the layer another weight "
                "(layer.weight = ...), or run with --dtype float32, where weights are plain"
            )
        args, kwargs = tree_map(
            lambda value: value.packed().numbers() if isinstance(value, cls) else value, (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kinds = "+".join(matrix.kind.name for _, matrix in sorted(self._matrices.items()))
        return f"PackedWeight(shape={tuple(self.shape)}, stored={kinds})"
