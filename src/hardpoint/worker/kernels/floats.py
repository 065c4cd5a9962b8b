"""What the float kernels are told, as `csrc/floats.h` has it: layers' facts, a step's layout, programs."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from typing import Any, ClassVar

import torch

# How keys and values are stored, by the name of the cache's number format.
STORES: dict[str, int] = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3}
# Elements a head may have.
MOST_ELEMENTS = 512


class AttentionFacts(Structure):
    """One layer's attention and its cache."""

    _fields_: ClassVar[Any] = [
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_size", c_int32),
        ("block_size", c_int32),
        ("store", c_int32),
        ("window", c_int32),
        ("causal", c_int32),
        ("shares", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("slopes", c_void_p),
        ("sinks", c_void_p),
        ("cache", c_void_p),
        ("block_stride", c_int64),
    ]


class Batch(Structure):
    """The requests of a step."""

    _fields_: ClassVar[Any] = [
        ("requests", c_int64),
        ("starts", c_void_p),
        ("lengths", c_void_p),
        ("blocks", c_void_p),
        ("blocks_stride", c_int64),
        ("slots", c_void_p),
    ]


class NormFacts(Structure):
    """A norm over the last dimension."""

    _fields_: ClassVar[Any] = [("weight", c_void_p), ("added", c_float), ("eps", c_float), ("size", c_int64)]


class RotaryFacts(Structure):
    """A rotary embedding."""

    _fields_: ClassVar[Any] = [
        ("table", c_void_p),
        ("rotary_dim", c_int32),
        ("head_size", c_int32),
        ("neox", c_int32),
    ]


class Activation(IntEnum):
    """Gated activation functions."""

    SILU_MUL = 0
    GELU_MUL = 1
    GELU_TANH_MUL = 2
    MUL_SILU = 3


class Kind(IntEnum):
    """Operations of a program."""

    EMBED = 0
    LINEAR = 1
    NORM = 2
    LAYER_NORM = 3
    ROTATE = 4
    ATTEND = 5
    ACTIVATE = 6
    ADD = 7
    SCALE = 8


class Op(Structure):
    """One operation of a program."""

    _fields_: ClassVar[Any] = [
        ("kind", c_int32),
        ("number", c_int32),
        ("what", c_void_p),
        ("in_", c_void_p),
        ("in_stride", c_int64),
        ("second", c_void_p),
        ("second_stride", c_int64),
        ("third", c_void_p),
        ("third_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("bias", c_void_p),
        ("size", c_int64),
        ("factor", c_float),
    ]


class Program(Structure):
    """Operations over buffers that hold `panel` tokens."""

    _fields_: ClassVar[Any] = [("ops", c_void_p), ("count", c_int64), ("panel", c_int64)]


class Step(Structure):
    """What a program runs with."""

    _fields_: ClassVar[Any] = [
        ("tokens", c_int64),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("batches", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
    ]


def rows_of(x: torch.Tensor) -> torch.Tensor | None:
    """The tensor as float32 rows [n, last dimension], copied if they do not lie so; None for another type."""
    if x.dtype is not torch.float32 or x.device.type != "cpu":
        return None
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
