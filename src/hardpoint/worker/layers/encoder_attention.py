"""Attention in both directions within a step: every token of a sequence sees all of it, and nothing is kept."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hardpoint.contracts.attention_backend import AttentionType
from hardpoint.worker.forward_context import get_forward_context


@dataclass(frozen=True)
class EncoderBatch:
    """A step for these layers: `starts` are the rows at which sequences begin, and the end of the last."""

    starts: list[int]


class EncoderOnlyAttention(nn.Module):
    """Multi-head attention without a causal mask and without a cache.

    Each sequence is computed by itself, so that what it gets does not depend on who else is in the step.
    num_heads, num_kv_heads  heads on this rank
    prefix                   the layer's name in the model
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        cache_config: Any = None,
        quant_config: Any = None,
        attn_type: str = AttentionType.ENCODER_ONLY,
        per_layer_sliding_window: int | None = None,
        prefix: str = "",
        **extra: Any,
    ) -> None:
        super().__init__()
        unknown = [name for name, value in extra.items() if value is not None]
        if attn_type != AttentionType.ENCODER_ONLY or unknown:
            raise ValueError(f"{prefix}: encoder-only attention does not take {unknown or attn_type}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.attn_type = attn_type
        self.layer_name = prefix
        # Tokens to each side that a token sees.
        self.reach = None if per_layer_sliding_window is None else per_layer_sliding_window // 2

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[tokens, heads * head_size], keys and values alike -> [tokens, heads * head_size]."""
        rows = query.shape[0]
        query = query.view(rows, self.num_heads, self.head_size).transpose(0, 1)
        key = key.view(rows, self.num_kv_heads, self.head_size).transpose(0, 1)
        value = value.view(rows, self.num_kv_heads, self.head_size).transpose(0, 1)
        starts = self._starts(rows)
        parts = [
            self._attend(query[:, start:end], key[:, start:end], value[:, start:end]) for start, end in pairwise(starts)
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).transpose(0, 1).reshape(rows, -1)

    def _starts(self, rows: int) -> list[int]:
        metadata = get_forward_context().attn_metadata
        batch = metadata.get(self.layer_name) if isinstance(metadata, dict) else None
        return batch.starts if isinstance(batch, EncoderBatch) else [0, rows]

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[heads, tokens, head_size] of one sequence."""
        mask = None
        if self.reach is not None and query.shape[1] > self.reach + 1:
            places = torch.arange(query.shape[1], device=query.device)
            mask = (places[:, None] - places[None]).abs() <= self.reach
        shared = self.num_kv_heads != self.num_heads
        return F.scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=mask, scale=self.scale, enable_gqa=shared
        )[0]

    def extra_repr(self) -> str:
        """Sizes, for printing the model."""
        return f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_size={self.head_size}, scale={self.scale}"
