"""The KV cache section."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from hardpoint.config.sections.base import Bytes, NonNegative, Positive, Section, Share, derived

CacheDType = str
MambaDType = Literal["auto", "float32", "float16", "bfloat16"]
MambaCacheMode = Literal["none", "align"]
PrefixCachingHashAlgo = Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
KVOffloadingBackend = Literal["native", "lmcache"]


@dataclass
class CacheConfig(Section):
    """Size, shape and reuse of the KV cache.

    block_size            tokens in a block; None until the platform or the default decides
    kv_cache_memory_bytes exact size per device; wins over the share `gpu_memory_utilization`
    num_gpu_blocks        result of planning, like the other fields that are not arguments
    """

    DEFAULT_BLOCK_SIZE: ClassVar[int] = 16

    block_size: Positive | None = None
    prefix_match_unit: Positive | None = None
    gpu_memory_utilization: Share = 0.92
    cache_dtype: CacheDType = "auto"
    is_attention_free: bool = False
    num_gpu_blocks_override: Positive | None = None
    sliding_window: int | None = None
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: PrefixCachingHashAlgo = "sha256"
    prefix_cache_retention_interval: NonNegative | None = 0
    kv_cache_dtype_skip_layers: list[str] = field(default_factory=list)
    mamba_page_size_padded: int | None = None
    mamba_block_size: Positive | None = None
    mamba_cache_dtype: MambaDType = "auto"
    mamba_ssm_cache_dtype: MambaDType = "auto"
    mamba_cache_mode: MambaCacheMode = "none"
    kv_sharing_fast_prefill: bool = False
    swa_bounded_replay: bool = True
    kv_cache_memory_bytes: Bytes | None = None
    kv_offloading_size: Annotated[float, msgspec.Meta(gt=0)] | None = None
    kv_offloading_backend: KVOffloadingBackend = "native"

    user_specified_block_size: bool = derived(False)
    kv_cache_layout: str | None = derived()
    num_gpu_blocks: int | None = derived()
    num_cpu_blocks: int | None = derived()
    kv_cache_size_tokens: int | None = derived()
    kv_cache_max_concurrency: float | None = derived()
    hash_block_size: int | None = derived()
    cache_hit_alignment_tokens: int | None = derived()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.user_specified_block_size = self.block_size is not None

    @property
    def device_memory_utilization(self) -> float:
        """The same share under its newer name."""
        return self.gpu_memory_utilization

    def metrics_info(self) -> dict[str, str]:
        """Return the labels of the `vllm:cache_config_info` metric."""
        return {name: str(value) for name, value in vars(self).items() if not name.startswith("_")}

    def copy_facts(self, model_config: Any) -> None:
        """Take over what the model decides."""
        self.is_attention_free = model_config.is_attention_free
        self.sliding_window = model_config.get_sliding_window()
