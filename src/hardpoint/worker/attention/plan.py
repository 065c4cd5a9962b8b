"""How one step's attention is cut into pieces, worked out once per step and shared by all layers.

A piece is some consecutive queries of one request and the cache slots they may see. A decoding
request is one piece; a long prompt is cut so that no mask grows beyond a bound. Pieces of different
requests are never joined, so what a request gets does not depend on who else is in the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

# Queries of one piece, where a mask is needed: its size is this times the context.
MAX_MASKED_QUERIES = 512


@dataclass
class Piece:
    """Queries `start` to `end` (rows of the step) against `keys` cached tokens.

    blocks    cache blocks of the tokens seen, in order
    skip      tokens in the first block that come before the first seen
    position  where the first query stands, counted from the first token seen
    causal    queries see what is before them only; `aligned` when also the first query is the first
              token (then kernels need no mask)
    window    tokens a query sees including itself; None = all
    """

    start: int
    end: int
    keys: int
    blocks: torch.Tensor
    skip: int
    position: int
    causal: bool
    window: int | None
    _masks: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    @property
    def aligned(self) -> bool:
        """Plain causal attention from the first token on."""
        return self.causal and self.position == 0 and self.window is None

    @property
    def sees_all(self) -> bool:
        """Whether every query sees every key of the piece."""
        return not self.causal or (self.end - self.start == 1)

    def distances(self) -> torch.Tensor:
        """[queries, keys] how many tokens each key stands before each query; negative = after it."""
        queries = torch.arange(self.position, self.position + self.end - self.start)
        return queries.unsqueeze(1) - torch.arange(self.keys)

    def visible(self) -> torch.Tensor:
        """[queries, keys] bool."""
        distance = self.distances()
        seen = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        return seen if self.window is None else seen & (distance < self.window)

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """[queries, keys] 0 where seen, -inf elsewhere; kept, since every layer asks for the same."""
        found = self._masks.get(dtype)
        if found is None:
            found = torch.zeros(self.end - self.start, self.keys, dtype=dtype)
            self._masks[dtype] = found.masked_fill_(~self.visible(), float("-inf"))
        return found


def cut(
    query_starts: list[int],
    seq_lens: list[int],
    block_table: torch.Tensor,
    block_size: int,
    window: int | None,
    causal: bool,
) -> list[Piece]:
    """Cut a step into pieces.

    query_starts  [requests + 1]  rows of the step where requests begin
    seq_lens      [requests]      tokens of each request, this step's included
    block_table   [requests, max_blocks]
    Requests without rows in the step (padding) give none.
    """
    pieces: list[Piece] = []
    for request, seq_len in enumerate(seq_lens):
        start, end = query_starts[request], query_starts[request + 1]
        if end <= start or seq_len <= 0:
            continue
        computed = seq_len - (end - start)
        for begin, stop in _spans(computed, seq_len, window, causal):
            pieces.append(
                _piece(start - computed + begin, begin, stop, seq_len, block_table[request], block_size, window, causal)
            )
    return pieces


def _spans(computed: int, seq_len: int, window: int | None, causal: bool) -> list[tuple[int, int]]:
    """Cut a request's new tokens into runs of positions, one if no mask is needed."""
    whole_prompt = computed == 0 and (window is None or seq_len <= window)
    if not causal or whole_prompt or seq_len - computed == 1:
        return [(computed, seq_len)]
    size = MAX_MASKED_QUERIES
    return [(begin, min(begin + size, seq_len)) for begin in range(computed, seq_len, size)]


def _piece(
    row: int,
    begin: int,
    stop: int,
    seq_len: int,
    table: torch.Tensor,
    block_size: int,
    window: int | None,
    causal: bool,
) -> Piece:
    seen_from = 0 if window is None or not causal else max(0, begin - window + 1)
    seen_to = stop if causal else seq_len
    first_block, last_block = seen_from // block_size, -(-seen_to // block_size)
    blocks = table[first_block:last_block].long()
    narrow = window is not None and causal and stop - begin > 1 and seen_to - seen_from > window
    return Piece(
        start=row,
        end=row + stop - begin,
        keys=seen_to - seen_from,
        blocks=blocks,
        skip=seen_from - first_block * block_size,
        position=begin - seen_from,
        causal=causal,
        window=window if narrow else None,
    )
