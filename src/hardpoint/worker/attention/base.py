"""What our backends share: a layer's facts, what it refuses, and the rows of a step that are padding."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, TypeVar

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


class StepMetadata(AttentionMetadata):
    """A step, of whose rows the first `num_actual_tokens` are tokens."""

    num_actual_tokens: int


M = TypeVar("M", bound=StepMetadata)


class StepBuilder(AttentionMetadataBuilder[M]):
    """Prepares a step."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @staticmethod
    def is_causal(step: CommonAttentionMetadata) -> bool:
        """Whether queries see what is before them only; NotImplementedError when that depends on the request."""
        if not isinstance(step.causal, bool):
            raise NotImplementedError("a causal mask per request is not supported")
        return step.causal


class LayerImpl(AttentionImpl[M]):
    """One layer: what its backend does not support is refused, what a step has beside tokens becomes zero.

    takes_soft_cap  whether scores can be capped; the other facts are the backend's
    group           heads that share a key/value head
    """

    backend: ClassVar[type[AttentionBackend]]
    takes_soft_cap: ClassVar[bool] = True

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
        backend = self.backend
        self._refuse(
            {
                "capped scores": bool(logits_soft_cap) and not self.takes_soft_cap,
                "attention sinks": sinks is not None and not backend.supports_sink(),
                "the square root of ALiBi distances": bool(use_alibi_sqrt) and not backend.supports_alibi_sqrt(),
                f"{attn_type!s} attention": not backend.supports_attn_type(attn_type),
                f"KV cache dtype {kv_cache_dtype!r}": not backend.supports_kv_cache_dtype(kv_cache_dtype),
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
        self.sinks = sinks

    def _refuse(self, asked: dict[str, bool]) -> None:
        found = ", ".join(what for what, is_asked in asked.items() if is_asked)
        if found:
            raise ConfigError(
                f"the attention backend {self.backend.get_name()} does not support {found}",
                code="attention-unsupported",
                fix="choose another one with --attention-backend",
            )

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: M | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write [tokens, heads, head_size] into `output`; see the contract. Padding rows become zero."""
        if attn_metadata is None:
            return output.zero_()
        if attn_metadata.num_actual_tokens < output.shape[0]:
            output[attn_metadata.num_actual_tokens :].zero_()
        new = None if key is None or value is None or self.shares_cache else (key, value)
        self.compute(query, new, kv_cache, attn_metadata, output)
        return output

    @abstractmethod
    def compute(
        self,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        kv_cache: torch.Tensor,
        metadata: M,
        output: torch.Tensor,
    ) -> None:
        """Write the `new` keys and values [tokens, kv_heads, head_size] to the cache, then the result into `output`.

        The rows are those of `forward`, padding included.
        """
