"""Attention on the host processor, in plain torch, over a paged KV cache.

This is the reference: each request is computed by itself with `scaled_dot_product_attention` over
its blocks. A token's keys and values lie side by side in memory, so consecutive blocks are read in
place and scattered ones with one gather.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from hardpoint.config.sections import VllmConfig
from hardpoint.contracts.attention_backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from hardpoint.contracts.kv_cache import AttentionSpec
from hardpoint.errors import ConfigError
from hardpoint.worker.attention.plan import Piece, cut


class CPUAttentionBackend(AttentionBackend):
    """The backend of the CPU platform."""

    supported_dtypes = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes = ["auto", "float32", "bfloat16", "float16"]

    @staticmethod
    def get_name() -> str:
        """CPU_ATTN."""
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionImpl]:
        """The arithmetic."""
        return CPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """The step's preparation."""
        return CPUAttentionMetadataBuilder

    @staticmethod
    def get_kv_cache_stride_order() -> tuple[int, ...]:
        """Blocks, then tokens, then keys beside values."""
        return 1, 2, 0, 3, 4

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Yes."""
        return True


@dataclass
class CPUAttentionMetadata(AttentionMetadata):
    """A step for this backend.

    slots       [tokens to write] int64 cache slots    rows  [tokens to write] their rows; None = the first ones
    pieces      made on demand for each window that a layer has
    """

    num_actual_tokens: int
    slots: torch.Tensor
    rows: torch.Tensor | None
    query_starts: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor
    block_size: int
    causal: bool
    _pieces: dict[int | None, list[Piece]] = field(default_factory=dict)

    def pieces(self, window: int | None) -> list[Piece]:
        """The step cut for layers with this window."""
        if window not in self._pieces:
            self._pieces[window] = cut(
                self.query_starts, self.seq_lens, self.block_table, self.block_size, window, self.causal
            )
        return self._pieces[window]


class CPUAttentionMetadataBuilder(AttentionMetadataBuilder[CPUAttentionMetadata]):
    """Prepares a step."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        """Return the step's metadata."""
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise NotImplementedError("a causal mask per request is not supported on a CPU")
        slots = common.slot_mapping[: common.num_actual_tokens].long()
        rows = None
        if slots.numel() and int(slots.min()) < 0:
            rows = (slots >= 0).nonzero().flatten()
            slots = slots[rows]
        return CPUAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            slots=slots,
            rows=rows,
            query_starts=common.query_start_loc_cpu[: common.num_reqs + 1].tolist(),
            seq_lens=common.seq_lens[: common.num_reqs].tolist(),
            block_table=common.block_table_tensor,
            block_size=self.kv_cache_spec.block_size,
            causal=common.causal,
        )

    def update_block_table(
        self, metadata: CPUAttentionMetadata, block_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> CPUAttentionMetadata:
        """Not offered: building anew is as quick."""
        raise NotImplementedError


class CPUAttentionImpl(AttentionImpl[CPUAttentionMetadata]):
    """One layer: writes the step's keys and values to the cache, then attends piece by piece."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        use_alibi_sqrt: bool | None = None,
        **extra: Any,
    ) -> None:
        _refuse(
            {
                "attention sinks": sinks is not None,
                "the square root of ALiBi distances": bool(use_alibi_sqrt),
                f"{attn_type!s} attention": attn_type != AttentionType.DECODER,
                f"KV cache dtype {kv_cache_dtype!r}": not CPUAttentionBackend.supports_kv_cache_dtype(kv_cache_dtype),
                **{f"the option {name!r}": value is not None for name, value in extra.items()},
            }
        )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.group = num_heads // self.num_kv_heads
        self.sliding_window = sliding_window
        self.soft_cap = logits_soft_cap or None
        self.shares_cache = kv_sharing_target_layer_name is not None
        self.slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write [tokens, heads, head_size] into `output`; see the contract. Padding rows become zero."""
        if attn_metadata is None:
            return output.zero_()
        # [slots, 2, kv_heads, head_size], in memory order: a token's keys, then its values.
        cache = kv_cache.permute(1, 2, 0, 3, 4).view(-1, 2, self.num_kv_heads, self.head_size)
        if not self.shares_cache:
            self._write(cache, key, value, attn_metadata)
        if attn_metadata.num_actual_tokens < output.shape[0]:
            output[attn_metadata.num_actual_tokens :].zero_()
        for piece in attn_metadata.pieces(self.sliding_window):
            self._attend(piece, query, cache, attn_metadata.block_size, output)
        return output

    def _write(
        self, cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: CPUAttentionMetadata
    ) -> None:
        count = metadata.num_actual_tokens
        tokens = torch.stack((key[:count], value[:count]), dim=1)
        if metadata.rows is not None:
            tokens = tokens[metadata.rows]
        cache.index_copy_(0, metadata.slots, tokens.to(cache.dtype))

    def _seen(self, piece: Piece, cache: torch.Tensor, block_size: int) -> torch.Tensor:
        """[2, kv_heads, keys, head_size] keys and values of the tokens a piece sees."""
        if piece.first is not None:
            start = piece.first * block_size + piece.skip
            seen = cache[start : start + piece.keys]
        else:
            blocks = cache.view(-1, block_size, *cache.shape[1:])
            seen = blocks.index_select(0, piece.blocks).flatten(0, 1)[piece.skip : piece.skip + piece.keys]
        return seen.permute(1, 2, 0, 3)

    def _attend(
        self, piece: Piece, query: torch.Tensor, cache: torch.Tensor, block_size: int, output: torch.Tensor
    ) -> None:
        rows = query[piece.start : piece.end]
        count = rows.shape[0]
        keys, values = self._seen(piece, cache, block_size).to(query.dtype)
        # Heads that share a key/value head become a dimension of their own: nothing is repeated.
        heads = rows.view(count, self.num_kv_heads, self.group, self.head_size)
        target = output[piece.start : piece.end].view(heads.shape)
        if self.soft_cap is not None or self.slopes is not None:
            target.copy_(self._combine_by_scores(piece, heads.permute(1, 2, 0, 3), keys, values).permute(2, 0, 1, 3))
        elif count == 1:
            # One query: its heads are the queries of their key/value head.
            target.copy_(F.scaled_dot_product_attention(heads, keys[None], values[None], scale=self.scale))
        else:
            target.copy_(self._combine(piece, heads.permute(1, 2, 0, 3), keys, values).permute(2, 0, 1, 3))

    def _combine(self, piece: Piece, heads: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[kv_heads, group, queries, head_size], [kv_heads, keys, head_size] twice -> as the first."""
        shape = (self.num_kv_heads, self.group, piece.keys, self.head_size)
        keys, values = keys.unsqueeze(1).expand(shape), values.unsqueeze(1).expand(shape)
        if piece.aligned:
            return F.scaled_dot_product_attention(heads, keys, values, is_causal=True, scale=self.scale)
        mask = None if piece.sees_all else piece.mask(heads.dtype)
        return F.scaled_dot_product_attention(heads, keys, values, attn_mask=mask, scale=self.scale)

    def _combine_by_scores(
        self, piece: Piece, heads: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        scores = (heads.float() @ keys.float().unsqueeze(1).transpose(-1, -2)) * self.scale
        if self.soft_cap is not None:
            scores = torch.tanh(scores / self.soft_cap) * self.soft_cap
        if self.slopes is not None:
            scores -= self.slopes.view(self.num_kv_heads, self.group, 1, 1) * piece.distances()
        weights = torch.softmax(scores + piece.mask(torch.float32), dim=-1)
        return (weights @ values.float().unsqueeze(1)).to(heads.dtype)


def _refuse(asked: dict[str, bool]) -> None:
    found = [what for what, is_asked in asked.items() if is_asked]
    if found:
        raise ConfigError(
            f"the attention backend CPU_ATTN does not support {', '.join(found)}", code="attention-unsupported"
        )
