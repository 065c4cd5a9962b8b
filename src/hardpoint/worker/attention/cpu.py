"""Attention on the host processor over a paged KV cache: in the CPU kernels, or in plain torch.

The kernels compute all requests of a step in one call. Torch is the reference, and computes what the kernels do not
take (activations that are not float32): each request by itself with `scaled_dot_product_attention`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from hardpoint.contracts.attention_backend import AttentionBackend, CommonAttentionMetadata
from hardpoint.worker.attention.base import LayerImpl, StepBuilder, StepMetadata
from hardpoint.worker.attention.plan import Piece, cut
from hardpoint.worker.attention.storage import CACHE_DTYPES, PagedCache, cache_shape
from hardpoint.worker.kernels.floats import MOST_ELEMENTS, STORES, AttentionFacts, Batch
from hardpoint.worker.kernels.library import Library, kernels


class CPUAttentionBackend(AttentionBackend):
    """The backend of the CPU platform."""

    supported_dtypes = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes = ["auto", *CACHE_DTYPES]

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
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """(2, blocks, key/value heads, block size, numbers); see `storage`."""
        return cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str)

    @staticmethod
    def get_kv_cache_stride_order() -> tuple[int, ...]:
        """Blocks, then heads, then keys beside values."""
        return 1, 2, 0, 3, 4

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Yes."""
        return True


@dataclass
class CPUAttentionMetadata(StepMetadata):
    """A step for this backend.

    query_starts  [requests + 1] int32    seq_lens  [requests] int32    block_table  [requests, blocks] int32
    slots         [tokens] int64 cache slots; -1 = not written
    batch         the same for the kernels
    """

    num_actual_tokens: int
    slots: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    block_size: int
    causal: bool
    batch: Batch
    _pieces: dict[int | None, list[Piece]] = field(default_factory=dict)

    def pieces(self, window: int | None) -> list[Piece]:
        """The step cut for layers with this window, for torch; made on demand."""
        if window not in self._pieces:
            starts, lengths = self.query_starts.tolist(), self.seq_lens.tolist()
            self._pieces[window] = cut(starts, lengths, self.block_table, self.block_size, window, self.causal)
        return self._pieces[window]


class CPUAttentionMetadataBuilder(StepBuilder[CPUAttentionMetadata]):
    """Prepares a step."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        """Return the step's metadata."""
        common, causal = common_attn_metadata, self.is_causal(common_attn_metadata)
        requests, tokens = common.num_reqs, common.num_actual_tokens
        starts = common.query_start_loc_cpu[: requests + 1].int().contiguous()
        lengths = common.seq_lens[:requests].int().contiguous()
        blocks = common.block_table_tensor[:requests].int().contiguous()
        slots = common.slot_mapping[:tokens].long().contiguous()
        batch = Batch(
            requests, starts.data_ptr(), lengths.data_ptr(), blocks.data_ptr(), blocks.shape[-1], slots.data_ptr()
        )
        size = self.kv_cache_spec.block_size
        return CPUAttentionMetadata(tokens, slots, starts, lengths, blocks, size, causal, batch)


class CPUAttentionImpl(LayerImpl[CPUAttentionMetadata]):
    """One layer: writes the step's keys and values to the cache, then attends."""

    backend = CPUAttentionBackend

    def __init__(self, num_heads: int, head_size: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(num_heads, head_size, *args, **kwargs)
        self.library: Library | None = kernels() if head_size <= MOST_ELEMENTS else None
        self._facts: tuple[int, AttentionFacts, torch.Tensor | None] | None = None

    def compute(
        self,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        kv_cache: torch.Tensor,
        metadata: CPUAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        """In the kernels where they take the step's numbers, else in torch."""
        if self.library is not None and query.dtype is torch.float32 and output.is_contiguous():
            self._attend_in_kernels(self.library, query, new, kv_cache, metadata, output)
        else:
            self._attend_in_torch(query, new, kv_cache, metadata, output)

    def facts(self, kv_cache: torch.Tensor, causal: bool = True) -> AttentionFacts:
        """What the kernels are told of this layer; valid as long as this object, and until it has another cache."""
        place = kv_cache.data_ptr()
        if self._facts is None or self._facts[0] != place:
            sinks = None if self.sinks is None else self.sinks.detach().float().contiguous()
            facts = AttentionFacts(
                heads=self.num_heads,
                kv_heads=self.num_kv_heads,
                head_size=self.head_size,
                block_size=kv_cache.shape[3],
                store=STORES[str(kv_cache.dtype).removeprefix("torch.")],
                window=self.sliding_window or 0,
                causal=True,
                shares=self.shares_cache,
                scale=self.scale,
                soft_cap=self.soft_cap or 0.0,
                slopes=None if self.slopes is None else self.slopes.data_ptr(),
                sinks=None if sinks is None else sinks.data_ptr(),
                cache=place,
                block_stride=kv_cache.stride(1) * kv_cache.element_size(),
            )
            self._facts = place, facts, sinks
        facts = self._facts[1]
        facts.causal = causal
        return facts

    def _attend_in_kernels(
        self,
        library: Library,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        kv_cache: torch.Tensor,
        metadata: CPUAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        facts = self.facts(kv_cache, metadata.causal)
        query = _as_rows(query)
        keys = (None, 0, None, 0)
        if new is not None:
            key, value = map(_as_rows, new)
            keys = key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0)  # type: ignore[assignment]
        library.attention(
            ctypes.addressof(facts), ctypes.addressof(metadata.batch), query.data_ptr(), query.stride(0), *keys,
            output.data_ptr(), output.stride(0),
        )  # fmt: skip

    def _attend_in_torch(
        self,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        kv_cache: torch.Tensor,
        metadata: CPUAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        cache = PagedCache(kv_cache, self.head_size)
        if new is not None:
            key, value = new
            count = metadata.num_actual_tokens
            rows = (metadata.slots >= 0).nonzero().flatten()
            cache.write(metadata.slots[rows], key[:count][rows], value[:count][rows])
        for piece in metadata.pieces(self.sliding_window):
            self._attend(piece, query, cache, output)

    def _attend(self, piece: Piece, query: torch.Tensor, cache: PagedCache, output: torch.Tensor) -> None:
        rows = query[piece.start : piece.end]
        count = rows.shape[0]
        # [kv_heads, keys, head_size] of the tokens the piece sees.
        keys, values = (part[:, piece.skip : piece.skip + piece.keys] for part in cache.read(piece.blocks, query.dtype))
        # Heads that share a key/value head become a dimension of their own: nothing is repeated.
        heads = rows.view(count, self.num_kv_heads, self.group, self.head_size)
        target = output[piece.start : piece.end].view(heads.shape)
        if self.soft_cap is not None or self.slopes is not None or self.sinks is not None:
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
        scores = scores + piece.mask(torch.float32)
        if self.sinks is not None:
            # A score of its own for each head, which takes its share and has no value.
            sinks = self.sinks.float().view(self.num_kv_heads, self.group, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : piece.keys]
        return (weights @ values.float().unsqueeze(1)).to(heads.dtype)


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, head_size] with each token's heads side by side, as the kernels read them."""
    fits = x.dtype is torch.float32 and x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if fits else x.float().contiguous()
