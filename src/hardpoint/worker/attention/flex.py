"""Attention by torch's FlexAttention: what a query sees and how scores are changed is a function of positions.

On a CUDA device it is compiled to a kernel. On a processor it is computed as it stands, which is exact and slow.
Verified on a processor only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

from hardpoint.worker.attention.paged import PagedBackend, PagedImpl, PagedMetadata, keys_and_values

ScoreMod = Callable[[torch.Tensor, Any, Any, Any, Any], torch.Tensor]


class FlexAttentionBackend(PagedBackend):
    """FLEX_ATTENTION."""

    @staticmethod
    def get_name() -> str:
        """FLEX_ATTENTION."""
        return "FLEX_ATTENTION"

    @staticmethod
    def get_impl_cls() -> type[FlexAttentionImpl]:
        """The arithmetic."""
        return FlexAttentionImpl


class FlexAttentionImpl(PagedImpl):
    """One layer."""

    backend = FlexAttentionBackend

    def attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: PagedMetadata, output: torch.Tensor
    ) -> None:
        """Request by request."""
        for request, first, last, length in metadata.spans():
            keys, values = keys_and_values(kv_cache, metadata.blocks[request], length, query.dtype)
            # A tensor: a number would be compiled into the kernel.
            position = torch.tensor(length - (last - first), device=query.device)
            found = _attend(
                query[first:last].transpose(0, 1)[None],
                keys[None],
                values[None],
                score_mod=self._score_mod(position, metadata.causal),
                scale=self.scale,
                enable_gqa=self.group > 1,
            )
            output[first:last] = found[0].transpose(0, 1)

    def _score_mod(self, position: torch.Tensor, causal: bool) -> ScoreMod:
        soft_cap, window = self.soft_cap, self.sliding_window
        slopes = None if self.slopes is None else self.slopes.to(position.device)

        def change(score: torch.Tensor, batch: Any, head: Any, row: Any, key: Any) -> torch.Tensor:
            distance = position + row - key
            if soft_cap is not None:
                score = torch.tanh(score / soft_cap) * soft_cap
            if slopes is not None:
                score = score - slopes[head] * distance
            if causal:
                score = torch.where(distance >= 0, score, float("-inf"))
            if window is not None:
                score = torch.where(distance < window, score, float("-inf"))
            return score

        return change


def _attend(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if query.device.type == "cuda":
        return _compiled()(query, *args, **kwargs)
    with _uncompiled():
        return flex.flex_attention(query, *args, **kwargs)


@cache
def _compiled() -> Any:
    return torch.compile(flex.flex_attention, dynamic=True)


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Otherwise torch traces each call anew, and gives up after a few shapes."""
    before = flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        yield
    finally:
        flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before
