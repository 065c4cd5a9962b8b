"""The kernel of the Triton backend: attention with an online softmax, keys and values found by block table."""

# ruff: noqa: ANN001, ANN202 - Triton reads annotations of a kernel as its types

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _changed(
    score, distance, slope, soft_cap, window,
    CAUSAL: tl.constexpr, CAPS: tl.constexpr, WINDOWS: tl.constexpr, SLOPES: tl.constexpr,
):  # fmt: skip
    """[rows, keys] scores capped and lowered with the distance; -inf where a query must not look."""
    if CAPS:
        score = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 * score / soft_cap) + 1.0))
    if SLOPES:
        score -= slope[:, None] * distance
    if CAUSAL:
        score = tl.where(distance >= 0, score, float("-inf"))
    if WINDOWS:
        score = tl.where(distance < window, score, float("-inf"))
    return score


@triton.jit
def _kernel(
    output, query, keys, values, blocks, tiles, starts, lengths, slopes, sinks,
    scale, soft_cap, window,
    stride_q, stride_q_head, stride_o, stride_o_head, stride_block, stride_token, stride_head, stride_table,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    HEAD: tl.constexpr, HEAD_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr, CAPS: tl.constexpr, WINDOWS: tl.constexpr, SLOPES: tl.constexpr, SINKS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One program: some query tokens of a request, and the heads that share a key/value head."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    request = tl.load(tiles + 2 * tile)
    first = tl.load(tiles + 2 * tile + 1)
    start = tl.load(starts + request)
    count = tl.load(starts + request + 1) - start
    length = tl.load(lengths + request)
    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    live = (row < QUERIES * GROUP) & (token < count)
    position = length - count + token
    dim = tl.arange(0, HEAD_PADDED)
    inside = live[:, None] & (dim < HEAD)[None, :]
    at = (start + token).to(tl.int64)[:, None]
    q = tl.load(query + at * stride_q + head[:, None] * stride_q_head + dim[None, :], mask=inside, other=0.0)
    q = q.to(tl.float32) if WIDE else q
    if SINKS:
        best = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32)
        total = tl.full([ROWS], 1.0, tl.float32)
    else:
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, HEAD_PADDED], tl.float32)
    begin, end = 0, length
    if CAUSAL:
        end = tl.minimum(length, length - count + first + QUERIES)
    if WINDOWS:
        begin = tl.maximum(0, length - count + first - window + 1)
    for base in range(begin, end, KEYS):
        key = base + tl.arange(0, KEYS)
        known = key < end
        block = tl.load(blocks + request * stride_table + key // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        place = block * stride_block + (key % BLOCK_SIZE) * stride_token + kv_head * stride_head
        there = known[:, None] & (dim < HEAD)[None, :]
        k = tl.load(keys + place[:, None] + dim[None, :], mask=there, other=0.0).to(q.dtype)
        score = tl.dot(q, tl.trans(k), input_precision="ieee").to(tl.float32) * scale
        distance = position[:, None] - key[None, :]
        slope = tl.load(slopes + head, mask=live, other=0.0)
        score = _changed(score, distance, slope, soft_cap, window, CAUSAL, CAPS, WINDOWS, SLOPES)
        score = tl.where(live[:, None] & known[None, :], score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        # A row that has seen nothing yet: its difference would be no number.
        level = tl.where(new_best == float("-inf"), 0.0, new_best)
        weight = tl.exp(score - level[:, None])
        shrink = tl.exp(best - level)
        v = tl.load(values + place[:, None] + dim[None, :], mask=there, other=0.0).to(q.dtype)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(q.dtype), v, input_precision="ieee").to(tl.float32)
        total = total * shrink + tl.sum(weight, 1)
        best = new_best
    result = (mixed / tl.where(total == 0.0, 1.0, total)[:, None]).to(output.dtype.element_ty)
    tl.store(output + at * stride_o + head[:, None] * stride_o_head + dim[None, :], result, mask=inside)


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    step: Any,
    output: torch.Tensor,
    *,
    scale: float,
    window: int,
    soft_cap: float,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    rows: int,
    keys: int,
) -> None:
    """Write [tokens, heads, head_size] into `output`.

    kv_cache      [2, blocks, block size, kv_heads, head_size]; `step` a TritonMetadata
    slopes, sinks [heads] float32 or None    window, soft_cap  0 = none
    rows, keys    powers of two: rows and keys that a program holds at once
    """
    _, _, block_size, kv_heads, head_size = kv_cache.shape
    if query.stride(2) != 1:
        query = query.contiguous()
    _kernel[(len(step.tiles), kv_heads)](
        output, query, kv_cache[0], kv_cache[1], step.blocks, step.tiles, step.starts_tensor, step.lengths_tensor,
        query if slopes is None else slopes, query if sinks is None else sinks,
        scale, soft_cap, window,
        query.stride(0), query.stride(1), output.stride(0), output.stride(1),
        kv_cache.stride(1), kv_cache.stride(2), kv_cache.stride(3), step.blocks.stride(0),
        GROUP=query.shape[1] // kv_heads, QUERIES=step.queries_a_tile, ROWS=rows, KEYS=keys,
        HEAD=head_size, HEAD_PADDED=max(16, triton.next_power_of_2(head_size)), BLOCK_SIZE=block_size,
        CAUSAL=step.causal, CAPS=bool(soft_cap), WINDOWS=bool(window),
        SLOPES=slopes is not None, SINKS=sinks is not None,
        # The interpreter multiplies no half formats.
        WIDE=query.device.type == "cpu",
    )  # fmt: skip
