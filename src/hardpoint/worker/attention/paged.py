"""What the backends in torch share: the step as they see it, and a layer that writes its keys and values first.

A layer's cache is [2, blocks, block size, key/value heads, head size], keys before values, blocks outermost in
memory. Block 0 belongs to no request.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from hardpoint.contracts.attention_backend import AttentionBackend, CommonAttentionMetadata
from hardpoint.worker.attention.base import LayerImpl, StepBuilder, StepMetadata


class PagedBackend(AttentionBackend):
    """Facts that hold for all of them."""

    supported_dtypes = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes = ["auto", "float32", "bfloat16", "float16"]

    @staticmethod
    def get_builder_cls() -> type[PagedMetadataBuilder]:
        """The step's preparation."""
        return PagedMetadataBuilder

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Yes."""
        return True


@dataclass
class PagedMetadata(StepMetadata):
    """A step.

    starts, lengths             rows where requests begin, one more than requests; tokens of each request
    starts_tensor [requests + 1] int32, lengths_tensor [requests] int32   the same on the device
    blocks        [requests, most blocks] int64     slots  [tokens] int64, 0 where nothing is to be kept
    causal        queries see what is before them only
    """

    num_actual_tokens: int
    starts: list[int]
    lengths: list[int]
    starts_tensor: torch.Tensor
    lengths_tensor: torch.Tensor
    blocks: torch.Tensor
    slots: torch.Tensor
    causal: bool

    def spans(self) -> list[tuple[int, int, int, int]]:
        """(request, first row, row after the last, tokens) of the requests that have rows in the step."""
        rows = zip(self.starts, self.starts[1:], self.lengths, strict=False)
        return [(i, first, last, length) for i, (first, last, length) in enumerate(rows) if last > first]


class PagedMetadataBuilder(StepBuilder[PagedMetadata]):
    """Prepares a step."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        """Return the step's metadata."""
        step, causal = common_attn_metadata, self.is_causal(common_attn_metadata)
        known = step.seq_lens_cpu_upper_bound
        lengths = known if known is not None else step.seq_lens
        return PagedMetadata(
            num_actual_tokens=step.num_actual_tokens,
            starts=step.query_start_loc_cpu[: step.num_reqs + 1].tolist(),
            lengths=lengths[: step.num_reqs].tolist(),
            starts_tensor=step.query_start_loc[: step.num_reqs + 1].int(),
            lengths_tensor=step.seq_lens[: step.num_reqs].int(),
            blocks=step.block_table_tensor[: step.num_reqs].long(),
            # What is not to be kept goes where nobody reads: testing for it would wait for the device.
            slots=step.slot_mapping[: step.num_actual_tokens].long().clamp(min=0),
            causal=causal,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> PagedMetadata:
        """Over the very tensors that are given, which a graph reads at each replay; all slots in them are kept."""
        step = self.build(0, common_attn_metadata)
        step.slots = common_attn_metadata.slot_mapping[: common_attn_metadata.num_actual_tokens]
        return step


class PagedImpl(LayerImpl[PagedMetadata]):
    """One layer: keeps the step's keys and values, then lets the subclass attend."""

    def compute(
        self,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        kv_cache: torch.Tensor,
        metadata: PagedMetadata,
        output: torch.Tensor,
    ) -> None:
        """Keep, then attend."""
        tokens = metadata.num_actual_tokens
        if new is not None:
            key, value = new
            self._keep(key[:tokens], value[:tokens], kv_cache, metadata.slots)
        self.attend(query[:tokens], kv_cache, metadata, output[:tokens])

    def _keep(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
        size = kv_cache.shape[2]
        block, place = slots // size, slots % size
        kv_cache[0, block, place] = key.to(kv_cache.dtype)
        kv_cache[1, block, place] = value.to(kv_cache.dtype)

    @abstractmethod
    def attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: PagedMetadata, output: torch.Tensor
    ) -> None:
        """Write the step's [tokens, heads, head_size] into `output`."""


def keys_and_values(
    kv_cache: torch.Tensor, blocks: torch.Tensor, length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """[kv_heads, length, head_size] twice: what a request has in its `blocks`."""
    used = blocks[: -(-length // kv_cache.shape[2])]
    keys, values = kv_cache[:, used].flatten(1, 2)[:, :length].to(dtype).transpose(1, 2)
    return keys, values
