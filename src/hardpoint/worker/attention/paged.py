"""What the backends in torch share: the step as they see it, and a layer that writes its keys and values first.

A layer's cache is [2, blocks, block size, key/value heads, head size], keys before values, blocks outermost in
memory. Block 0 belongs to no request.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

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
class PagedMetadata(AttentionMetadata):
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


class PagedMetadataBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Prepares a step."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        """Return the step's metadata."""
        step = common_attn_metadata
        if not isinstance(step.causal, bool):
            raise NotImplementedError("a causal mask per request is not supported")
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
            causal=step.causal,
        )


class PagedImpl(AttentionImpl[PagedMetadata]):
    """One layer: keeps the step's keys and values, then lets the subclass attend."""

    name: ClassVar[str]
    takes_soft_cap: ClassVar[bool] = True
    takes_sinks: ClassVar[bool] = False

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
        **extra: Any,
    ) -> None:
        self._refuse(
            {
                "capped scores": bool(logits_soft_cap) and not self.takes_soft_cap,
                "attention sinks": sinks is not None and not self.takes_sinks,
                f"{attn_type!s} attention": attn_type != AttentionType.DECODER,
                f"KV cache dtype {kv_cache_dtype!r}": kv_cache_dtype not in PagedBackend.supported_kv_cache_dtypes,
                **{f"the option {name!r}": bool(value) for name, value in extra.items()},
            }
        )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.group = num_heads // self.num_kv_heads
        self.window = sliding_window
        self.soft_cap = logits_soft_cap or None
        self.shares_cache = kv_sharing_target_layer_name is not None
        self.slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sinks = sinks

    def _refuse(self, asked: dict[str, bool]) -> None:
        found = ", ".join(what for what, is_asked in asked.items() if is_asked)
        if found:
            raise ConfigError(
                f"the attention backend {self.name} does not support {found}",
                code="attention-unsupported",
                fix="leave --attention-backend out, or name another one",
            )

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write [tokens, heads, head_size] into `output`; see the contract. Padding rows become zero."""
        if attn_metadata is None:
            return output.zero_()
        tokens = attn_metadata.num_actual_tokens
        if tokens < output.shape[0]:
            output[tokens:].zero_()
        if key is not None and value is not None and not self.shares_cache:
            self._keep(key[:tokens], value[:tokens], kv_cache, attn_metadata.slots)
        self.attend(query[:tokens], kv_cache, attn_metadata, output[:tokens])
        return output

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
