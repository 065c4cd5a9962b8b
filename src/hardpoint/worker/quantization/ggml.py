"""The storage types of GGUF files, decoded in torch.

A tensor's rows are runs of blocks; a block is some bytes that stand for 32 or 256 numbers. Each
decoder takes [blocks, bytes] uint8 and gives [blocks, numbers] float32, with the same roundings as
llama.cpp: products and sums of float32, in this order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hardpoint.config.gguf_file import BLOCK_SIZES, GGMLType

Decoder = Callable[[Tensor], Tensor]


def _half(blocks: Tensor, at: int) -> Tensor:
    """[blocks, 1] the float16 at byte `at` of each block."""
    return blocks[:, at : at + 2].view(torch.float16).float()


def _together(packed: Tensor) -> Tensor:
    """The bytes with none between them. A single row counts as contiguous already, wherever it begins."""
    return packed.contiguous() if len(packed) > 1 else packed.clone(memory_format=torch.contiguous_format)


def _bits(packed: Tensor, shifts: int, width: int = 1) -> Tensor:
    """[blocks, n] bytes -> [blocks, shifts * n] uint8.

    All bytes' lowest `width` bits, then all bytes' next ones, and so on.
    """
    # Eight bytes at a time, which is several times as fast.
    wide = _together(packed).view(torch.int64)
    mask = int.from_bytes(bytes([(1 << width) - 1]) * 8, "little")
    return torch.cat([((wide >> shift * width) & mask).view(torch.uint8) for shift in range(shifts)], dim=1)


def _nibbles(packed: Tensor) -> Tensor:
    """[blocks, n] bytes -> [blocks, 2n] float32: all low halves, then all high halves."""
    return _bits(packed, 2, 4).float()


def _f32(blocks: Tensor) -> Tensor:
    return blocks.view(torch.float32)


def _f16(blocks: Tensor) -> Tensor:
    return blocks.view(torch.float16).float()


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.view(torch.bfloat16).float()


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """[blocks, 32] the fifth bit of each number, as 16 or 0."""
    bits = _together(blocks[:, at : at + 4]).view(torch.int32)
    return ((bits >> torch.arange(32, dtype=torch.int32)) & 1).float().mul_(16)


def _q5_0(blocks: Tensor) -> Tensor:
    numbers = _nibbles(blocks[:, 6:]).add_(_fifth_bits(blocks, 2))
    return numbers.sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    numbers = _nibbles(blocks[:, 8:]).add_(_fifth_bits(blocks, 4))
    return numbers.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _quarters(packed: Tensor) -> Tensor:
    """[blocks, 64] bytes of four 2-bit numbers -> [blocks, 256] uint8.

    Two halves of 32 bytes; of each half first all lowest pairs of bits, then the next.
    """
    return _bits(packed.reshape(-1, 32), 4, 2).view(-1, 256)


def _scaled(numbers: Tensor, scale: Tensor, least: Tensor | None = None) -> Tensor:
    """[blocks, 256] small integers times the scale of their run, minus its minimum: [blocks, runs] each."""
    runs = numbers.float().view(*scale.shape, -1).mul_(scale.unsqueeze(-1))
    return (runs if least is None else runs.sub_(least.unsqueeze(-1))).flatten(1)


def _q2_k(blocks: Tensor) -> Tensor:
    scales, numbers = blocks[:, :16], _quarters(blocks[:, 16:80])
    return _scaled(numbers, _half(blocks, 80) * (scales & 15), _half(blocks, 82) * (scales >> 4))


def _q3_k(blocks: Tensor) -> Tensor:
    high, low, packed = blocks[:, :32], _quarters(blocks[:, 32:96]), blocks[:, 96:108]
    # Sixteen 6-bit scales: four bits each in the first eight bytes, the upper two in the last four.
    upper = torch.cat([(packed[:, 8:] >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1)
    scales = _nibbles(packed[:, :8]).add_(upper << 4).sub_(32)
    # A third bit that is not set takes 4 away.
    missing = (_bits(high, 8) ^ 1) << 2
    return _scaled(low.view(torch.int8) - missing.view(torch.int8), _half(blocks, 108) * scales)


def _scales_and_mins(packed: Tensor) -> tuple[Tensor, Tensor]:
    """[blocks, 12] bytes -> eight 6-bit scales and eight 6-bit minima, [blocks, 8] each."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    mins = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scales, mins


def _with_mins(blocks: Tensor, numbers: Tensor) -> Tensor:
    """[blocks, 256] small integers times their scale minus their minimum, in eights of a block."""
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    return _scaled(numbers, _half(blocks, 0) * scales, _half(blocks, 2) * mins)


def _runs_of_nibbles(packed: Tensor) -> Tensor:
    """[blocks, 128] bytes -> [blocks, 256] uint8: of every 32 bytes all low halves, then all high halves."""
    return _bits(packed.reshape(-1, 32), 2, 4).view(-1, 256)


def _q4_k(blocks: Tensor) -> Tensor:
    return _with_mins(blocks, _runs_of_nibbles(blocks[:, 16:]))


def _q5_k(blocks: Tensor) -> Tensor:
    return _with_mins(blocks, _runs_of_nibbles(blocks[:, 48:]) | (_bits(blocks[:, 16:48], 8) << 4))


def _q6_k(blocks: Tensor) -> Tensor:
    low = _bits(blocks[:, :128].reshape(-1, 64), 2, 4).view(-1, 256)
    numbers = (low | (_quarters(blocks[:, 128:192]) << 4)).view(torch.int8) - 32
    return _scaled(numbers, blocks[:, 192:208].view(torch.int8) * _half(blocks, 208))


DECODERS: dict[GGMLType, Decoder] = {
    GGMLType.F32: _f32,
    GGMLType.F16: _f16,
    GGMLType.BF16: _bf16,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q2_K: _q2_k,
    GGMLType.Q3_K: _q3_k,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
}


def dequantize(rows: Tensor, ggml_type: GGMLType) -> Tensor:
    """[rows, bytes] uint8 -> [rows, numbers] float32; KeyError for a type without a decoder."""
    decode = DECODERS[ggml_type]
    _, block_bytes = BLOCK_SIZES[ggml_type]
    return decode(rows.reshape(-1, block_bytes)).view(rows.shape[0], -1)
