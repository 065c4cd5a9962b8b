"""The attention layer of a model: finds its backend when built, its metadata and cache when called."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hardpoint.config.current import get_current_vllm_config
from hardpoint.config.sections import CacheConfig, VllmConfig
from hardpoint.contracts.attention_backend import (
    AttentionBackend,
    AttentionLayerBase,
    AttentionMetadata,
    AttentionType,
)
from hardpoint.contracts.kv_cache import FullAttentionSpec, KVCacheSpec, KVQuantMode, SlidingWindowSpec
from hardpoint.contracts.quantization import QuantizationConfig
from hardpoint.worker.attention.registry import AttentionBackendEnum
from hardpoint.worker.attention.selector import get_attn_backend
from hardpoint.worker.attention.storage import CACHE_DTYPES
from hardpoint.worker.forward_context import get_forward_context


class Attention(nn.Module, AttentionLayerBase):
    """Multi-head, multi-query or grouped-query attention over a KV cache.

    num_heads, num_kv_heads  heads on this rank
    per_layer_sliding_window tokens this layer sees; the cache section's window unless given
    prefix                   the layer's name in the model; no two layers may have the same
    kv_sharing_target_layer_name  the layer whose cache this one reads instead of having its own
    kv_cache                 bound by the worker before the first step
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        use_alibi_sqrt: bool | None = None,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        logits_soft_cap: float | None = None,
        per_layer_sliding_window: int | None = None,
        prefix: str = "",
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        mm_prefix_clamp_sliding_window: bool = False,
        attn_backend: type[AttentionBackend] | None = None,
        head_size_v: int | None = None,
        **extra_impl_args: Any,
    ) -> None:
        super().__init__()
        vllm_config = get_current_vllm_config()
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % self.num_kv_heads:
            raise ValueError(f"{prefix}: {num_heads} heads cannot share {self.num_kv_heads} key/value heads evenly")
        self.head_size = head_size
        self.head_size_v = head_size if head_size_v is None else head_size_v
        self.scale = scale
        self.attn_type = attn_type
        self.layer_name = prefix
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window = per_layer_sliding_window
        if per_layer_sliding_window is None and cache_config is not None:
            self.sliding_window = cache_config.sliding_window
        self.kv_cache_dtype = cache_config.cache_dtype if cache_config is not None else "auto"
        dtype = torch.get_default_dtype()
        self.attn_backend = attn_backend or get_attn_backend(
            head_size,
            dtype,
            self.kv_cache_dtype,
            cache_config.block_size if cache_config is not None else None,
            has_sink=extra_impl_args.get("sinks") is not None,
            attn_type=attn_type,
            num_heads=num_heads,
            has_sliding_window=self.sliding_window is not None,
        )
        if use_alibi_sqrt is not None:
            extra_impl_args["use_alibi_sqrt"] = use_alibi_sqrt
        if self.head_size_v != head_size:
            extra_impl_args["head_size_v"] = self.head_size_v
        self.impl = self._make_impl(alibi_slopes, logits_soft_cap, extra_impl_args)
        self.kv_cache_torch_dtype: torch.dtype = CACHE_DTYPES.get(self.kv_cache_dtype, dtype)
        # Scales of a quantised cache, which some backends read whether it is one or not.
        self._q_scale, self._k_scale, self._v_scale = (torch.tensor(1.0) for _ in range(3))
        self._q_scale_float = self._k_scale_float = self._v_scale_float = 1.0
        self.kv_cache = torch.empty(0)
        _register(vllm_config, prefix, self)

    def _make_impl(self, alibi_slopes: list[float] | None, soft_cap: float | None, extra: dict[str, Any]) -> Any:
        return self.attn_backend.get_impl_cls()(
            self.num_heads,
            self.head_size,
            self.scale,
            self.num_kv_heads,
            alibi_slopes,
            self.sliding_window,
            self.kv_cache_dtype,
            soft_cap,
            self.attn_type,
            self.kv_sharing_target_layer_name,
            **extra,
        )

    @property
    def backend(self) -> AttentionBackendEnum:
        """The backend's name as a member."""
        return AttentionBackendEnum[self.attn_backend.get_name()]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        output_shape: torch.Size | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """[tokens, heads * head_size], keys and values alike -> [tokens, heads * head_size_v]."""
        tokens = query.shape[0]
        output = torch.empty(
            (tokens, self.num_heads, self.head_size_v), dtype=output_dtype or query.dtype, device=query.device
        )
        query = query.view(tokens, self.num_heads, self.head_size)
        if key is not None:
            key = key.view(-1, self.num_kv_heads, self.head_size)
        if value is not None:
            value = value.view(-1, self.num_kv_heads, self.head_size_v)
        metadata = self._metadata()
        if not self.attn_backend.forward_includes_kv_cache_update and metadata is not None and key is not None:
            slots = get_forward_context().slot_mapping[self.layer_name]  # type: ignore[call-overload]
            self.impl.do_kv_cache_update(self, key, value, self.kv_cache, slots)
        self.impl.forward(self, query, key, value, self.kv_cache, metadata, output=output)
        return output.view(output_shape if output_shape is not None else (tokens, -1))

    def _metadata(self) -> AttentionMetadata | None:
        metadata = get_forward_context().attn_metadata
        return metadata.get(self.layer_name) if isinstance(metadata, dict) else None

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend it computes with."""
        return self.attn_backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """What it stores per token; None when it reads another layer's cache."""
        if self.kv_sharing_target_layer_name is not None:
            return None
        facts: dict[str, Any] = {
            "block_size": vllm_config.cache_config.block_size or CacheConfig.DEFAULT_BLOCK_SIZE,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "head_size_v": self.head_size_v,
            "dtype": str(self.kv_cache_torch_dtype).removeprefix("torch."),
        }
        if self.kv_cache_dtype == "int8_per_token_head":
            facts["kv_quant_mode"] = KVQuantMode.INT8_PER_TOKEN_HEAD
        window = self.sliding_window
        spec = FullAttentionSpec(**facts) if window is None else SlidingWindowSpec(**facts, sliding_window=window)
        return self.attn_backend.customize_spec(spec)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Let the implementation prepare after the model's weights are there."""
        self.impl.process_weights_after_loading(act_dtype)

    def extra_repr(self) -> str:
        """Sizes, for printing the model."""
        sizes = f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_size={self.head_size}, scale={self.scale}"
        return f"{sizes}, backend={self.attn_backend.get_name()}"


def _register(vllm_config: VllmConfig, prefix: str, layer: Attention) -> None:
    layers = vllm_config.compilation_config.static_forward_context
    if prefix in layers:
        raise ValueError(f"Duplicate layer name: {prefix!r}; give every attention layer a prefix of its own")
    layers[prefix] = layer
