"""How a layer's KV cache is described, planned and laid out in memory.

A worker reports one `KVCacheSpec` per layer; the engine core turns them into one `KVCacheConfig` per
worker; the worker allocates its tensors. Torch-free: storage types are names, e.g. "bfloat16".
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig

_BYTES_PER_ELEMENT = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


def dtype_size_bytes(dtype: str) -> int:
    """Bytes of one element of a storage type given by name; ValueError for an unknown name."""
    size = _BYTES_PER_ELEMENT.get(dtype)
    if size is None:
        raise ValueError(f"unknown storage type {dtype!r}; known: {', '.join(_BYTES_PER_ELEMENT)}")
    return size


def _ceil_div(amount: int, unit: int) -> int:
    return -(-amount // unit)


class KVCacheSpecKind(enum.Enum):
    """What a layer keeps per token, by name."""

    FULL_ATTENTION = "full_attention"
    MLA_ATTENTION = "mla_attention"
    SLIDING_WINDOW = "sliding_window"
    SLIDING_WINDOW_MLA = "sliding_window_mla"
    MAMBA = "mamba"
    CHUNKED_LOCAL_ATTENTION = "chunked_local_attention"
    SINK_FULL_ATTENTION = "sink_full_attention"
    ENCODER_ONLY_ATTENTION = "encoder_only_attention"
    CROSS_ATTENTION = "cross_attention"
    UNKNOWN = "unknown"


class KVQuantMode(enum.IntEnum):
    """How keys and values are compressed in the cache."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4
    NVFP4 = 5


class KVCacheGroupRole(enum.Enum):
    """What a group of layers is for."""

    DEFAULT = "default"


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """What one layer stores.

    block_size  tokens per block
    """

    block_size: int
    dcp_sharded: bool = False
    block_stride_alignment: int | None = None

    @property
    def kind(self) -> KVCacheSpecKind:
        """The kind of layer."""
        return KVCacheSpecKind.UNKNOWN

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of this layer."""
        raise NotImplementedError

    @property
    def prefix_cacheable(self) -> bool:
        """Whether a block may be reused by another request with the same prefix."""
        return True

    @property
    def prefix_replay_tokens(self) -> int:
        """Tokens before a prefix hit that must be computed again."""
        return 0

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes one request of the longest allowed length may hold in this layer."""
        max_len = vllm_config.model_config.max_model_len
        assert max_len is not None, "the configuration is not resolved"
        return self.max_num_blocks_per_req(vllm_config, max_len) * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """Blocks a request of `max_len` tokens may hold at once."""
        return _ceil_div(max_len, self.block_size)

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """The same layer with another number of tokens per block."""
        return replace(self, block_size=block_size)

    @classmethod
    def merge(cls, specs: Sequence[KVCacheSpec]) -> KVCacheSpec:
        """One spec for layers that share a block table; ValueError when they differ."""
        first = specs[0]
        if any(spec != first for spec in specs[1:]):
            raise ValueError("layers of one KV cache group must have the same spec")
        return first

    def is_uniform_with_collection(self, specs: dict[str, KVCacheSpec]) -> bool:
        """Whether all `specs` may share one block table with this one."""
        return all(type(spec) is type(self) and spec.block_size == self.block_size for spec in specs.values())


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """A layer that stores keys and values per token.

    num_kv_heads  heads on this rank      head_size, head_size_v  elements of a key, of a value
    dtype         name of the storage type; a torch.dtype is accepted and turned into its name
    """

    dcp_sharded: bool = True
    max_tp_shards: int | None = None
    num_kv_heads: int
    head_size: int
    dtype: str
    head_size_v: int = None  # type: ignore[assignment]  # head_size unless given
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    page_size_padded: int | None = None
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    tokens_per_state: int | Fraction = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)
        dtype_size_bytes(self.dtype)

    @property
    def num_heads(self) -> int:
        """Key/value heads stored per token."""
        return self.num_head_slots or self.num_kv_heads

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes a block needs, before padding."""
        elements = self.block_size * self.num_heads * (self.head_size + self.head_size_v)
        factors = 0
        if self.kv_quant_mode is KVQuantMode.INT8_PER_TOKEN_HEAD:
            # A float32 factor for each head of a token's key, and one for its value.
            factors = 2 * self.block_size * self.num_heads * dtype_size_bytes("float32")
        return elements * dtype_size_bytes(self.dtype) + factors

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block: keys and values of `block_size` tokens."""
        if self.page_size_padded is not None:
            if self.page_size_padded < self.real_page_size_bytes:
                raise ValueError("page_size_padded is smaller than the block it pads")
            return self.page_size_padded
        return self.real_page_size_bytes


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Attention over the whole sequence.

    `sliding_window` is kept where a windowed layer is stored like a full one.
    """

    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    non_causal: bool = False

    @property
    def kind(self) -> KVCacheSpecKind:
        """The kind of layer."""
        return KVCacheSpecKind.FULL_ATTENTION


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """Attention over the last `sliding_window` tokens; blocks that fall out of it are freed."""

    sliding_window: int
    extra_retained_tokens: int = 0

    @property
    def kind(self) -> KVCacheSpecKind:
        """The kind of layer."""
        return KVCacheSpecKind.SLIDING_WINDOW

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """Blocks for the window and one step's tokens, never more than the sequence needs."""
        return self.blocks_held(max_len, vllm_config.scheduler_config.max_num_batched_tokens)

    def blocks_held(self, num_tokens: int, max_step_tokens: int) -> int:
        """Most blocks held at once by a sequence of `num_tokens`, computed `max_step_tokens` a step."""
        live = self.sliding_window - 1 + self.extra_retained_tokens + max_step_tokens
        if live >= num_tokens:
            return _ceil_div(num_tokens, self.block_size)
        # One more: the live range need not begin at a block border.
        return min(_ceil_div(live, self.block_size) + 1, _ceil_div(num_tokens, self.block_size))

    def as_full_attention(self) -> FullAttentionSpec:
        """The same layer, stored without freeing blocks."""
        names = AttentionSpec.__dataclass_fields__
        return FullAttentionSpec(**{name: getattr(self, name) for name in names}, sliding_window=self.sliding_window)


@dataclass(frozen=True, kw_only=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """Attention inside one step: nothing is stored."""

    @property
    def kind(self) -> KVCacheSpecKind:
        """The kind of layer."""
        return KVCacheSpecKind.ENCODER_ONLY_ATTENTION

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """No block at all."""
        return 0


@dataclass(frozen=True, kw_only=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers of one kind whose pages differ in size (e.g. head counts per layer) under one block table."""

    kv_cache_specs: dict[str, KVCacheSpec] = field(default_factory=dict)

    @property
    def kind(self) -> KVCacheSpecKind:
        """The kind its layers have."""
        return next(iter(self.kv_cache_specs.values())).kind

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """Blocks a request of `max_len` tokens may hold at once."""
        return max(spec.max_num_blocks_per_req(vllm_config, max_len) for spec in self.kv_cache_specs.values())

    @classmethod
    def is_uniform_type(cls, specs: dict[str, KVCacheSpec]) -> bool:
        """Whether one block table can serve all of `specs`."""
        return bool(specs) and next(iter(specs.values())).is_uniform_with_collection(specs)

    @classmethod
    def from_specs(cls, specs: dict[str, KVCacheSpec]) -> UniformTypeKVCacheSpecs | None:
        """Group `specs`, or None when they are not of one kind and block size."""
        if not cls.is_uniform_type(specs):
            return None
        return cls(block_size=next(iter(specs.values())).block_size, kv_cache_specs=specs)


@dataclass(frozen=True, kw_only=True)
class KVCacheTensor:
    """One allocation. Block `b` of `layers[i]` starts at `offset + i * layer_stride + b * block_stride` bytes.

    A `layer_stride` of 0 with several layers means that they use the same memory, each in
    blocks of its own (layers of different groups).
    """

    size: int
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0
    host_resident: bool = False


@dataclass(frozen=True, kw_only=True)
class KVCacheGroupSpec:
    """Layers that share one block table."""

    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    is_eagle_group: bool = False
    host_resident: bool = False
    enable_kv_transfer: bool = True
    role: KVCacheGroupRole = KVCacheGroupRole.DEFAULT


@dataclass(frozen=True, kw_only=True)
class KVCacheConfig:
    """The plan one worker allocates by. Block 0 is never given to a request."""

    num_blocks: int
    kv_cache_tensors: list[KVCacheTensor]
    kv_cache_groups: list[KVCacheGroupSpec]
    prefix_cache_retention_interval: int | None = None
    kv_cache_layout: str | None = None
    hash_block_size: int | None = None
    cache_hit_alignment_tokens: int | None = None
    kv_tp_replicas: int = 1

    @property
    def transfer_group_ids(self) -> list[int]:
        """Indices of the groups a KV connector may see."""
        return [i for i, group in enumerate(self.kv_cache_groups) if group.enable_kv_transfer]

    @property
    def transfer_groups(self) -> list[KVCacheGroupSpec]:
        """The groups a KV connector may see."""
        return [group for group in self.kv_cache_groups if group.enable_kv_transfer]

    @property
    def prefix_cacheable_group_ids(self) -> list[int]:
        """Indices of the groups whose blocks can be reused."""
        return [i for i, group in enumerate(self.kv_cache_groups) if group.kv_cache_spec.prefix_cacheable]

    @property
    def prefix_cacheable_groups(self) -> list[KVCacheGroupSpec]:
        """The groups whose blocks can be reused."""
        return [group for group in self.kv_cache_groups if group.kv_cache_spec.prefix_cacheable]

    @property
    def host_group_ids(self) -> list[int]:
        """Indices of the groups that live in host memory."""
        return [i for i, group in enumerate(self.kv_cache_groups) if group.host_resident]

    @property
    def has_mamba_layers(self) -> bool:
        """Whether a layer keeps a recurrent state instead of keys and values."""
        return any(group.kv_cache_spec.kind is KVCacheSpecKind.MAMBA for group in self.kv_cache_groups)

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        """Whether new blocks must be cleared before use."""
        return self.has_mamba_layers


class KVCacheConfigBuilder(ABC):
    """Plans the KV cache; a platform names another class in `get_kv_cache_config_builder_cls`.

    Built   once in the engine core, after the workers have loaded the model.
    Called  `build`, once, before the workers allocate.
    Fault   what it raises stops the start.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config

    @abstractmethod
    def build(self, kv_cache_specs: list[dict[str, KVCacheSpec]], available_memory: list[int]) -> list[KVCacheConfig]:
        """Return one plan per worker, all with the same `num_blocks` and the same groups.

        kv_cache_specs    per worker: layer name -> spec; empty for a model without a KV cache
        available_memory  per worker: bytes free for the KV cache
        Raises ConfigError when not even one request of `max_model_len` tokens fits.
        """


def spec_of_layer(group: KVCacheGroupSpec, layer_name: str) -> KVCacheSpec:
    """The spec of one layer of a group, whichever way the group holds it."""
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[layer_name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
