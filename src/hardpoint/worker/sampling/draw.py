"""Picking one token per row: the best, a draw by inverse cumulative distribution, or, with a seed, by a race.

What a row gives depends on that row's logits, parameters and random numbers only, never on its neighbours.
A cumulative sum moves with every weight in it, so that where many small weights lie a draw changes with the
last bits of the logits, which differ from batch to batch. In a race each token runs with a random number of
its own and the first wins: only a near tie at the front could turn out another way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hardpoint.worker.sampling.randomness import exponentials

# Columns summed together in the first level of the draw.
_BLOCK = 256
# Best columns looked at before a row is sorted whole. Fixed steps, so that neighbours cannot change a row's path.
_CANDIDATES = (64, 256, 4096)


def best_tokens(logits: Tensor) -> Tensor:
    """The first column of each row's maximum, or of its first NaN.

    logits  [rows, vocab]
    ->      [rows] int64
    """
    if logits.device.type == "cpu" and logits.dtype is torch.float32:
        # Several times faster than torch's argmax on a CPU.
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def draw_tokens(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a column of each row with probability proportional to its weight.

    weights   [rows, columns] float32, not negative, a positive sum per row
    uniforms  [rows] float64 in [0, 1)
    ->        [rows] int64
    """
    rows, columns = weights.shape
    if columns <= 2 * _BLOCK:
        return _draw_in_block(weights, uniforms)
    padding = -columns % _BLOCK
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
    blocks = weights.view(rows, -1, _BLOCK)
    block, rest = _locate(blocks.sum(-1).cumsum(-1, dtype=torch.float64), uniforms)
    inside = blocks[torch.arange(rows, device=weights.device), block]
    return block * _BLOCK + _draw_in_block(inside, rest)


def race_tokens(weights: Tensor, streams: Tensor) -> Tensor:
    """Draw a column of each row as `draw_tokens` does, by the numbers of its stream.

    weights  [rows, columns] float32
    streams  [rows] int64, from `seeded_streams`
    ->       [rows] int64
    """
    tokens = torch.arange(weights.shape[-1], device=weights.device).unsqueeze(0)
    return (weights / exponentials(streams, tokens)).argmax(-1)


def _draw_in_block(weights: Tensor, uniforms: Tensor) -> Tensor:
    return _locate(weights.cumsum(-1, dtype=torch.float64), uniforms)[0]


def _locate(cumulated: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Find the column that `uniforms * total` falls in, and how far into that column (0 to 1)."""
    # Kept under the total, which rounding may reach: no column would be found there.
    target = (uniforms * cumulated[:, -1]).minimum(cumulated[:, -1] * (1 - 2.0**-50)).unsqueeze(-1)
    index = torch.searchsorted(cumulated, target, right=True)
    upper = cumulated.gather(-1, index)
    lower = cumulated.gather(-1, (index - 1).clamp(min=0)) * (index > 0)
    return index.squeeze(-1), ((target - lower) / (upper - lower)).squeeze(-1)


def draw_filtered(
    weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, numbers: Tensor, *, seeded: bool = False
) -> Tensor:
    """Draw from each row after min_p, top_k and top_p, in this order.

    weights   [rows, vocab] float32 with maximum 1 in each row
    top_k     [rows] int64, vocab = off      top_p, min_p  [rows] float32, 1 and 0 = off
    numbers   [rows] float64 in [0, 1), or the int64 streams of rows that are all seeded
    ->        [rows] int64
    """
    chosen = torch.empty(weights.shape[0], dtype=torch.int64, device=weights.device)
    pending = torch.arange(weights.shape[0], device=weights.device)
    vocab = weights.shape[-1]
    sizes = [size for size in _CANDIDATES if size < vocab] + [vocab]
    for size in sizes:
        # A row whose top_k is larger than this step waits for the step that covers it.
        now = _fits(top_k[pending], size, sizes, vocab).nonzero().squeeze(-1)
        if now.numel() == 0:
            continue
        rows = pending[now]
        tokens, decided = _draw_candidates(
            weights if rows.numel() == weights.shape[0] else weights[rows],
            size, top_k[rows], top_p[rows], min_p[rows], numbers[rows], seeded,
        )  # fmt: skip
        chosen[rows[decided]] = tokens[decided]
        left = torch.ones(pending.numel(), dtype=torch.bool, device=weights.device)
        left[now[decided]] = False
        pending = pending[left]
        if pending.numel() == 0:
            break
    return chosen


def _fits(top_k: Tensor, size: int, sizes: list[int], vocab: int) -> Tensor:
    if size == vocab:
        return torch.ones_like(top_k, dtype=torch.bool)
    # Without a top_k the nucleus is usually wider than the first step.
    return (top_k <= size) | ((top_k == vocab) & (size >= sizes[min(1, len(sizes) - 1)]))


def _draw_candidates(
    weights: Tensor, size: int, top_k: Tensor, top_p: Tensor, min_p: Tensor, numbers: Tensor, seeded: bool
) -> tuple[Tensor, Tensor]:
    """Draw among the `size` best columns; also tell for which rows these were enough."""
    vocab = weights.shape[-1]
    values, tokens = weights.sort(dim=-1, descending=True, stable=True) if size == vocab else weights.topk(size, dim=-1)
    columns = torch.arange(size, device=weights.device)
    kept = values * (values >= min_p.unsqueeze(-1)) * (columns < top_k.unsqueeze(-1))
    cumulated = kept.cumsum(-1, dtype=torch.float64)
    # The mass that top_p is a part of: of what min_p and top_k left, which may reach beyond the candidates.
    whole = (kept[:, -1] == 0) | (size >= vocab) | (top_k <= size)
    total = torch.where(whole, cumulated[:, -1], _mass(weights, min_p, whole))
    wanted = total * top_p
    # A column stays when the mass before it has not reached what is wanted; the first always stays.
    before = cumulated - kept
    kept = kept * ((before < wanted.unsqueeze(-1)) | (columns == 0))
    decided = whole | ((cumulated[:, -1] >= wanted) & (top_p < 1))
    drawn = (kept / exponentials(numbers, tokens)).argmax(-1) if seeded else _draw_in_block(kept, numbers)
    return tokens.gather(-1, drawn.unsqueeze(-1)).squeeze(-1), decided


def _mass(weights: Tensor, min_p: Tensor, known: Tensor) -> Tensor:
    """The sum of each row's weights of at least `min_p`; rows already `known` may be left out."""
    if bool(known.all()):
        return torch.ones(weights.shape[0], dtype=torch.float64, device=weights.device)
    if bool((min_p == 0).all()):
        return weights.sum(-1, dtype=torch.float64)
    return (weights * (weights >= min_p.unsqueeze(-1))).sum(-1, dtype=torch.float64)


def keep_filtered(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The logits with -inf for every token that min_p, top_k and top_p rule out (`draw_filtered`'s rules)."""
    weights, tokens = torch.softmax(logits, dim=-1).sort(dim=-1, descending=True, stable=True)
    columns = torch.arange(logits.shape[-1], device=logits.device)
    kept = weights * (weights >= min_p.unsqueeze(-1) * weights[:, :1]) * (columns < top_k.unsqueeze(-1))
    cumulated = kept.cumsum(-1, dtype=torch.float64)
    within = (cumulated - kept < cumulated[:, -1:] * top_p.unsqueeze(-1)) | (columns == 0)
    ruled_out = torch.ones_like(within).scatter_(-1, tokens, ~(within & (kept > 0)))
    return logits.masked_fill(ruled_out, float("-inf"))
