"""The float kernels one by one, for layers that compute for themselves. None: torch is to compute.

A layer's own implementation in torch (`forward_native`) is what a plugin overrides or patches, so a layer asks
`library_for` first, with the method as it was written.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from hardpoint.worker.kernels.floats import Activation, NormFacts, RotaryFacts, rows_of
from hardpoint.worker.kernels.library import Library, kernels

_PLAIN = torch.float32


def library_for(layer: Any, native: Any, x: torch.Tensor) -> Library | None:
    """The kernels, if they can read `x` and the layer's torch method is still `native`."""
    if x.dtype is not _PLAIN or x.device.type != "cpu" or type(layer).forward_native is not native:
        return None
    # What is traced or differentiated has to stay in torch.
    if x.requires_grad or type(x) is not torch.Tensor or torch.compiler.is_compiling():
        return None
    return kernels()


def rms_norm(
    library: Library, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, added: float, eps: float
) -> Any:
    """x / rms(x) * (weight + added) over the last dimension; with a residual -> (normed, x + residual)."""
    size = weight.numel()
    rows = rows_of(x)
    if rows is None or x.shape[-1] != size or not _is_plain(weight):
        return None
    facts = NormFacts(weight.data_ptr(), added, eps, size)
    total = None
    if residual is not None:
        if residual.dtype is not _PLAIN or residual.shape != x.shape:
            return None
        # The kernel writes the sum in the residual's place; the caller's stays as it is.
        total = residual.contiguous().clone() if residual.is_contiguous() else residual.contiguous()
    out = torch.empty(x.shape, dtype=_PLAIN)
    library.rms_norm(
        ctypes.addressof(facts), rows.data_ptr(), rows.stride(0), None if total is None else total.data_ptr(), size,
        out.data_ptr(), size, rows.shape[0],
    )  # fmt: skip
    return out if total is None else (out, total)


def layer_norm(
    library: Library, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor | None:
    """(x - mean) / deviation * weight + bias over the last dimension."""
    size = weight.numel()
    rows = rows_of(x)
    if rows is None or x.shape[-1] != size or not _is_plain(weight) or not _is_plain(bias):
        return None
    facts = NormFacts(weight.data_ptr(), 0.0, eps, size)
    out = torch.empty(x.shape, dtype=_PLAIN)
    library.layer_norm(
        ctypes.addressof(facts), bias.data_ptr(), rows.data_ptr(), rows.stride(0), out.data_ptr(), size, rows.shape[0]
    )
    return out


def rotate(
    library: Library,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    table: torch.Tensor,
    head_size: int,
    rotary_dim: int,
    neox: bool,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """[tokens] positions, [tokens, heads * head_size] twice -> the same two, turned; IndexError beyond the table."""
    if positions.dim() != 1 or query.dim() != 2 or not _is_plain(table):
        return None
    if key is not None and (key.dim() != 2 or key.dtype is not _PLAIN):
        return None
    at = positions.to(torch.int64).contiguous()
    if len(at) and not 0 <= int(at.min()) <= int(at.max()) < table.shape[0]:
        raise IndexError(f"positions are out of range: the rotary table has {table.shape[0]}")
    turned = query.clone(memory_format=torch.contiguous_format)
    turned_key = None if key is None else key.clone(memory_format=torch.contiguous_format)
    facts = RotaryFacts(table.data_ptr(), rotary_dim, head_size, neox)
    keys = (None, 0, 0) if turned_key is None else _heads(turned_key, head_size)
    library.rotate(ctypes.addressof(facts), at.data_ptr(), *_heads(turned, head_size), *keys, len(at))
    return turned, turned_key


def activate(library: Library, kind: Activation, x: torch.Tensor) -> torch.Tensor | None:
    """[..., 2d] -> [..., d]: a gated activation."""
    rows = rows_of(x)
    if rows is None:
        return None
    size = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], size), dtype=_PLAIN)
    library.activate(int(kind), rows.data_ptr(), rows.stride(0), size, out.data_ptr(), size, rows.shape[0])
    return out


def log_sums(logits: torch.Tensor) -> torch.Tensor:
    """log(sum(exp)) of each row of [rows, vocab] float32 logits: [rows, 1], the same whatever other rows there are."""
    library = kernels() if logits.device.type == "cpu" and logits.dtype is _PLAIN and logits.stride(-1) == 1 else None
    if library is None:
        return logits.logsumexp(-1, keepdim=True)
    sums = torch.empty((len(logits), 1), dtype=_PLAIN)
    library.log_sums(logits.data_ptr(), logits.stride(0), logits.shape[1], len(logits), sums.data_ptr())
    return sums


def _heads(x: torch.Tensor, head_size: int) -> tuple[int, int, int]:
    return x.data_ptr(), x.stride(0), x.shape[1] // head_size


def _is_plain(parameter: torch.Tensor) -> bool:
    return parameter.dtype is _PLAIN and parameter.is_contiguous() and parameter.device.type == "cpu"
