"""Products with weights that are not quantised, in the CPU kernels, which read them where torch keeps them.

So whoever reads, changes or replaces a layer's `weight` sees and gets what he would in torch, and no memory is added.
A row's result is the same alone, in any batch and with any number of threads.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from hardpoint.config.gguf_file import GGMLType
from hardpoint.worker.kernels.library import Library, Linear, Matrix, kernels

_KINDS = {torch.float32: GGMLType.F32, torch.float16: GGMLType.F16, torch.bfloat16: GGMLType.BF16}
_PLAIN = (torch.Tensor, nn.Parameter)
# Products from which on other Python threads are let run meanwhile.
_LONG = 1 << 25


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[..., inputs] -> [..., outputs]: `torch.nn.functional.linear`, in the kernels where they apply.

    The kernels sum in float32 and round to the input's type once. Where the processor multiplies bfloat16 numbers,
    those too small to be normal count as zero.
    """
    # What is traced has to stay in torch.
    if torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    library = kernels()
    if library is None or not _applies(x, weight, bias):
        return F.linear(x, weight, bias)
    if weight.dtype is torch.bfloat16:
        multiplied = library.bfloat_products
        if _torch_is_faster(multiplied):
            return F.linear(x, weight, bias)
        if multiplied:
            return _bfloat_linear(library, x, weight, bias)
    outputs, columns = weight.shape
    rows = x if x.dim() == 2 else x.reshape(-1, columns)
    if rows.dtype is not torch.float32 or rows.stride(-1) != 1:
        rows = rows.to(torch.float32).contiguous()
    added = None if bias is None else bias.to(torch.float32)
    tokens = rows.shape[0]
    out = torch.empty((*x.shape[:-1], outputs), dtype=torch.float32)
    call = library.plain_linear if tokens * weight.numel() < _LONG else library.plain_linear_long
    call(
        int(_KINDS[weight.dtype]), weight.data_ptr(), outputs, columns, rows.data_ptr(), rows.stride(0), tokens,
        out.data_ptr(), outputs, None if added is None else added.data_ptr(),
    )  # fmt: skip
    return out if x.dtype is torch.float32 else out.to(x.dtype)


def _applies(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    kind = weight.dtype
    if type(weight) not in _PLAIN or type(x) not in _PLAIN or kind not in _KINDS or x.dtype is not kind:
        return False
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return False
    if bias is not None and (bias.dtype is not kind or not bias.is_contiguous() or bias.shape != weight.shape[:1]):
        return False
    return (
        weight.device.type == x.device.type == "cpu"
        and weight.dim() == 2
        and weight.is_contiguous()
        and x.shape[-1:] == weight.shape[1:]
        and x.numel() > 0
        and weight.numel() > 0
    )


@cache
def _torch_is_faster(multiplied: bool) -> bool:
    """Whether torch has products of bfloat16 numbers that the kernels, which have some if `multiplied`, have not."""
    if multiplied:
        return torch.cpu._is_amx_tile_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() and torch.cpu._is_avx512_bf16_supported()


def _bfloat_linear(library: Library, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    outputs, columns = weight.shape
    rows = x if x.dim() == 2 else x.reshape(-1, columns)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    tokens = rows.shape[0]
    out = torch.empty((*x.shape[:-1], outputs), dtype=torch.bfloat16)
    call = library.bfloat_linear if tokens * weight.numel() < _LONG else library.bfloat_linear_long
    call(
        weight.data_ptr(), outputs, columns, rows.data_ptr(), rows.stride(0), tokens, out.data_ptr(), outputs,
        None if bias is None else bias.data_ptr(),
    )  # fmt: skip
    return out


class PlainLinear:
    """A weight as the kernels' programs are told of it; valid as long as its numbers stay where they are."""

    def __init__(self, weight: torch.Tensor) -> None:
        if type(weight) not in _PLAIN or weight.dtype is not torch.float32 or not weight.is_contiguous():
            raise ValueError("the weight is not a plain float32 matrix")
        self.outputs, self.columns = weight.shape
        self._weight = weight.detach()
        self._matrix = Matrix(int(GGMLType.F32), 1, self.outputs, self._weight.data_ptr())
        self._layer = Linear(self.columns, 1, ctypes.pointer(self._matrix))

    @property
    def place(self) -> int:
        """Address of the layer's description."""
        return ctypes.addressof(self._layer)
