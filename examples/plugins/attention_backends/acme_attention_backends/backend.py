"""The backend: facts about itself, what it needs to know of a step, and a layer's arithmetic."""

from dataclasses import dataclass
from typing import Any

import torch

from hardpoint.contracts.attention_backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)


class AcmeBackend(AttentionBackend):
    """Correct and slow: one request after the other, one matrix product each."""

    supported_dtypes = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes = ["auto", "float32", "bfloat16", "float16"]

    @staticmethod
    def get_name() -> str:
        """The name it is registered under."""
        return "ACME_ATTN"

    @staticmethod
    def get_impl_cls() -> type["AcmeImpl"]:
        """A layer's arithmetic."""
        return AcmeImpl

    @staticmethod
    def get_builder_cls() -> type["AcmeBuilder"]:
        """What prepares a step."""
        return AcmeBuilder


@dataclass
class AcmeMetadata(AttentionMetadata):
    """A step: where requests begin among its rows, how long they are, which blocks and slots are theirs."""

    starts: list[int]
    lengths: list[int]
    blocks: torch.Tensor
    slots: torch.Tensor
    rows: int


class AcmeBuilder(AttentionMetadataBuilder[AcmeMetadata]):
    """Once per step, for all layers."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AcmeMetadata:
        """Take from the step what the layers need."""
        step = common_attn_metadata
        return AcmeMetadata(
            starts=step.query_start_loc_cpu.tolist(),
            lengths=step.seq_lens.tolist(),
            blocks=step.block_table_tensor.long(),
            slots=step.slot_mapping[: step.num_actual_tokens].long(),
            rows=step.num_actual_tokens,
        )


class AcmeImpl(AttentionImpl[AcmeMetadata]):
    """Once per layer and step."""

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
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **extra: Any,
    ) -> None:
        if alibi_slopes or sliding_window or logits_soft_cap or attn_type != "decoder" or extra:
            raise ValueError("ACME_ATTN computes plain causal attention only")
        self.scale = scale
        self.group = num_heads // (num_kv_heads or num_heads)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: AcmeMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[tokens, heads, head_size] into `output`; kv_cache [2, blocks, block_size, kv_heads, head_size]."""
        output.zero_()
        if attn_metadata is None:  # a profiling run
            return output
        step, size = attn_metadata, kv_cache.shape[2]
        block, place = step.slots // size, step.slots % size
        kv_cache[0, block, place] = key[: step.rows].to(kv_cache.dtype)
        kv_cache[1, block, place] = value[: step.rows].to(kv_cache.dtype)
        for request, length in enumerate(step.lengths):
            first, last = step.starts[request], step.starts[request + 1]
            if last > first:
                blocks = step.blocks[request, : -(-length // size)]
                keys, values = kv_cache[:, blocks].flatten(1, 2)[:, :length].float()
                output[first:last] = self._attend(query[first:last].float(), keys, values).to(output.dtype)
        return output

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[queries, heads, size], [length, kv_heads, size] twice; the queries are the last tokens."""
        keys, values = (part.repeat_interleave(self.group, dim=1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * self.scale
        positions = torch.arange(len(keys))
        hidden = positions > positions[-len(query) :, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values)
