"""Attention by torch's `scaled_dot_product_attention`, one request after the other. Runs on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hardpoint.worker.attention.paged import PagedBackend, PagedImpl, PagedMetadata, keys_and_values

# Queries computed at once where a mask is needed: it has this many rows.
_MOST_QUERIES = 512


class TorchSDPABackend(PagedBackend):
    """TORCH_SDPA."""

    @staticmethod
    def get_name() -> str:
        """TORCH_SDPA."""
        return "TORCH_SDPA"

    @staticmethod
    def get_impl_cls() -> type[TorchSDPAImpl]:
        """The arithmetic."""
        return TorchSDPAImpl


class TorchSDPAImpl(PagedImpl):
    """One layer."""

    backend = TorchSDPABackend
    takes_soft_cap = False

    def attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: PagedMetadata, output: torch.Tensor
    ) -> None:
        """Request by request."""
        for request, first, last, length in metadata.spans():
            keys, values = keys_and_values(kv_cache, metadata.blocks[request], length, query.dtype)
            computed = length - (last - first)
            for begin in range(first, last, _MOST_QUERIES):
                end = min(begin + _MOST_QUERIES, last)
                position = computed + begin - first
                # [kv_heads, group, queries, head_size]: heads that share keys and values lie together.
                rows = query[begin:end].unflatten(1, (self.num_kv_heads, self.group)).permute(1, 2, 0, 3)
                mask = self._mask(position, end - begin, length, metadata.causal, rows)
                shape = (self.num_kv_heads, self.group, *keys.shape[1:])
                own_keys, own_values = keys.unsqueeze(1).expand(shape), values.unsqueeze(1).expand(shape)
                found = F.scaled_dot_product_attention(rows, own_keys, own_values, attn_mask=mask, scale=self.scale)
                output[begin:end] = found.permute(2, 0, 1, 3).flatten(1, 2)

    def _mask(self, position: int, queries: int, length: int, causal: bool, like: torch.Tensor) -> torch.Tensor | None:
        """[queries, keys], with ALiBi [kv_heads, group, queries, keys]; None when everything is seen."""
        if (
            self.slopes is None
            and self.sliding_window is None
            and (not causal or (queries == 1 and position == length - 1))
        ):
            return None
        distance = position + torch.arange(queries, device=like.device).unsqueeze(1)
        distance = distance - torch.arange(length, device=like.device)
        seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if self.sliding_window is not None:
            seen &= distance < self.sliding_window
        if self.slopes is None:
            return seen
        slopes = self.slopes.to(like.device).view(self.num_kv_heads, self.group, 1, 1)
        return (-slopes * distance).masked_fill(~seen, float("-inf")).to(like.dtype)
