"""What an attention backend implements: facts about itself, a metadata builder, a layer's arithmetic.

Chosen  once per distinct attention layer, in the worker, by `Platform.get_attn_backend_cls`.
Called  the builder once per KV cache group and step; `AttentionImpl.forward` once per layer and step.
Fault   `validate_configuration` names what a backend cannot do; what `forward` raises ends the step.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig
    from hardpoint.contracts.kv_cache import AttentionSpec, KVCacheSpec


class AttentionType(enum.StrEnum):
    """Who attends to whom; compares equal to its string."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(enum.Enum):
    """Which steps a backend can replay from a captured device graph."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


class MultipleOf(NamedTuple):
    """Any block size that `base` divides."""

    base: int


class AttentionSelectorConfig(NamedTuple):
    """The facts about a layer a platform chooses its backend by."""

    head_size: int
    dtype: torch.dtype
    kv_cache_dtype: str | None
    block_size: int | None
    use_mla: bool = False
    has_sink: bool = False
    use_sparse: bool = False
    use_mm_prefix: bool = False
    use_per_head_quant_scales: bool = False
    attn_type: str = AttentionType.DECODER
    has_sliding_window: bool = False
    use_non_causal: bool = False
    use_batch_invariant: bool = False
    use_kv_connector: bool = False
    use_pcp: bool = False
    use_adaptive_verification: bool = False
    use_dcp: bool = False
    use_rswa: bool = False


class AttentionMetadata:
    """What one backend's layers need to know about a step; each backend has its own."""


M = TypeVar("M", bound=AttentionMetadata)


@dataclass
class CommonAttentionMetadata:
    """One step as every backend's builder sees it.

    query_start_loc     [requests + 1]  where each request's tokens start in the step's rows
    seq_lens            [requests]      tokens per request including this step's
    block_table_tensor  [requests, max_blocks]  cache blocks of each request, in order
    slot_mapping        [tokens]        cache slot each token is written to; -1 = write nothing
    max_query_len, max_seq_len          the largest of each; max_seq_len may be an upper bound
    Rows from `num_actual_tokens` on are padding.
    """

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True
    logits_indices_padded: torch.Tensor | None = None
    num_logits_indices: int | None = None
    max_logits_per_req: int | None = None
    encoder_seq_lens: torch.Tensor | None = None
    encoder_seq_lens_cpu: np.ndarray[Any, Any] | None = None
    dcp_local_seq_lens: torch.Tensor | None = None
    dcp_local_seq_lens_cpu_upper_bound: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    is_prefilling: torch.Tensor | None = None
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    req_idx: np.ndarray[Any, Any] | None = None
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None
    rswa_prefix_lens: torch.Tensor | None = None

    def batch_size(self) -> int:
        """How many requests the step has."""
        return self.num_reqs

    def naive_query_lens(self) -> torch.Tensor:
        """[requests] this step's tokens of each request."""
        return self.query_start_loc[1:] - self.query_start_loc[:-1]

    def compute_num_computed_tokens(self) -> torch.Tensor:
        """[requests] tokens of each request that earlier steps have computed."""
        return self.seq_lens - self.naive_query_lens()

    def token_to_req_indices(self, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """[tokens] the request each row belongs to, written into `buffer` when one is given."""
        requests = torch.arange(self.num_reqs, device=self.query_start_loc.device, dtype=torch.int32)
        indices = torch.repeat_interleave(requests, self.naive_query_lens().to(requests.device))
        if buffer is None:
            return indices
        buffer[: indices.numel()].copy_(indices)
        return buffer[: indices.numel()]

    def replace(self, **changes: Any) -> CommonAttentionMetadata:
        """A copy with other values."""
        return replace(self, **changes)

    def unpadded(self, num_actual_tokens: int, num_actual_reqs: int) -> CommonAttentionMetadata:
        """A copy without padding requests and rows."""
        return self.replace(
            query_start_loc=self.query_start_loc[: num_actual_reqs + 1],
            query_start_loc_cpu=self.query_start_loc_cpu[: num_actual_reqs + 1],
            seq_lens=self.seq_lens[:num_actual_reqs],
            num_reqs=num_actual_reqs,
            num_actual_tokens=num_actual_tokens,
            block_table_tensor=self.block_table_tensor[:num_actual_reqs],
            slot_mapping=self.slot_mapping[:num_actual_tokens],
        )


class AttentionMetadataBuilder(ABC, Generic[M]):
    """Turns one step into a backend's own metadata, for the layers of one KV cache group.

    Built   once per group, in the worker, after the KV cache is allocated.
    Called  `build`, once per step.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None
    supports_update_block_table: bool = False

    @abstractmethod
    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec) -> AttentionCGSupport:
        """Which steps can be replayed from a device graph."""
        return cls._cudagraph_support

    @abstractmethod
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> M:
        """Return the step's metadata, shared by all layers of the group.

        common_prefix_len  tokens all requests have in common; 0 today
        fast_build         prefer a quick build over quick layers
        """

    def update_block_table(self, metadata: M, block_table: torch.Tensor, slot_mapping: torch.Tensor) -> M:
        """The same step with another block table; only with `supports_update_block_table`."""
        raise NotImplementedError

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> M:
        """Metadata for recording a device graph."""
        return self.build(0, common_attn_metadata)

    def build_for_drafting(self, common_attn_metadata: CommonAttentionMetadata, draft_index: int) -> M:
        """Metadata for the drafter's pass number `draft_index`."""
        return self.build(0, common_attn_metadata, fast_build=True)


class AttentionLayer(Protocol):
    """What an `AttentionImpl` may read from the layer it computes for."""

    layer_name: str
    kv_cache: torch.Tensor

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Compute the layer."""


class AttentionImplBase(ABC, Generic[M]):
    """A layer's arithmetic, whatever its shape."""

    num_heads: int
    head_size: int
    scale: float
    can_return_lse_for_decode: bool = False
    supports_quant_query_input: bool = False
    dcp_world_size: int
    dcp_rank: int
    pcp_world_size: int
    pcp_rank: int

    def __new__(cls, *args: Any, **kwargs: Any) -> AttentionImplBase[M]:
        """Allocate with the context-parallel facts in place, so that a constructor can read them."""
        self = super().__new__(cls)
        self.dcp_world_size = self.pcp_world_size = 1
        self.dcp_rank = self.pcp_rank = 0
        return self

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Prepare after the model's weights are there."""

    def get_impl_variants(self) -> tuple[AttentionImplBase[M], ...]:
        """This implementation and those it may hand over to."""
        return (self,)

    def prepare_for_batch(self, attn_metadata: M) -> None:
        """Prepare for a step before the first layer runs."""


class AttentionImpl(AttentionImplBase[M]):
    """Attention over separate queries, keys and values."""

    @abstractmethod
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
        **extra: Any,
    ) -> None: ...

    @abstractmethod
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
        """Write the layer's result into `output` and return it.

        query       [tokens, heads, head_size]
        key, value  [tokens, kv_heads, head_size]
        kv_cache    the shape `AttentionBackend.get_kv_cache_shape` gives
        output      [tokens, heads, head_size]
        attn_metadata is None in a memory profiling run: nothing is cached, any finite result will do.
        """

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write keys and values; called before `forward` when the backend separates the two."""
        raise NotImplementedError


class AttentionBackend(ABC):
    """A way to compute attention: what it can do, and the classes that do it."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update: ClassVar[bool] = True

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """The member of `AttentionBackendEnum` this is."""

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImplBase[Any]]:
        """The class that computes a layer."""

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        """The class that prepares a step."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Shape of one layer's cache as `AttentionImpl.forward` sees it."""
        return 2, num_blocks, block_size, num_kv_heads, head_size

    @staticmethod
    def get_kv_cache_stride_order() -> tuple[int, ...]:
        """Dimensions of `get_kv_cache_shape` in the order they lie in memory, outermost first.

        Blocks must come first: a block's bytes are contiguous, so that it can be moved whole.
        """
        return 1, 0, 2, 3, 4

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        """Block sizes the kernels take."""
        return [MultipleOf(1)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Head sizes the kernels take; empty = all."""
        return []

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The block size to use when the user names none."""
        return default_block_size

    @classmethod
    def customize_spec(cls, spec: KVCacheSpec) -> KVCacheSpec:
        """The spec this backend stores a layer with."""
        return spec

    @classmethod
    def supported_kv_cache_layouts(cls) -> list[str] | None:
        """Names of cache layouts it takes; None = its own."""
        return None

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether heads of this size can be computed."""
        sizes = cls.get_supported_head_sizes()
        return not sizes or head_size in sizes

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        """Whether activations of this type can be computed."""
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """Whether keys and values can be stored as this type."""
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Whether the kernels take blocks of this many tokens."""
        if block_size is None:
            return True
        return any(
            block_size % size.base == 0 if isinstance(size, MultipleOf) else block_size % size == 0
            for size in cls.get_supported_kernel_block_sizes()
        )

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Whether the device is new enough."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Whether this kind of attention can be computed."""
        return attn_type == AttentionType.DECODER

    @classmethod
    def is_mla(cls) -> bool:
        """Whether it computes latent attention."""
        return False

    @classmethod
    def is_sparse(cls) -> bool:
        """Whether it computes sparse attention."""
        return False

    @classmethod
    def is_ssm(cls) -> bool:
        """Whether it keeps a recurrent state."""
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        """Attention sinks."""
        return False

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        """ALiBi with the square root of the distance."""
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Media that attend in both directions inside a causal sequence."""
        return False

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """A cache quantised with a scale per head."""
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """A layer that sees only the last tokens."""
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        """A window with a remembered prefix."""
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Attention in both directions."""
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Whether a request's result is bit-identical in any batch."""
        return False

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Whether its blocks can be moved by a KV connector."""
        return True

    @classmethod
    def supports_pcp(cls) -> bool:
        """Prefill context parallelism."""
        return False

    @classmethod
    def supports_dcp(cls) -> bool:
        """Decode context parallelism."""
        return False

    @classmethod
    def supports_combination(cls, **facts: Any) -> str | None:
        """A reason why facts that are fine one by one do not go together; None = they do."""
        return None

    @classmethod
    def validate_configuration(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool = False,
        has_sink: bool = False,
        use_sparse: bool = False,
        use_mm_prefix: bool = False,
        use_per_head_quant_scales: bool = False,
        device_capability: Any = None,
        attn_type: str = AttentionType.DECODER,
        has_sliding_window: bool = False,
        use_non_causal: bool = False,
        use_batch_invariant: bool = False,
        use_kv_connector: bool = False,
        use_pcp: bool = False,
        use_adaptive_verification: bool = False,
        use_dcp: bool = False,
        use_rswa: bool = False,
    ) -> list[str]:
        """Reasons why a layer with these facts cannot use this backend; empty = it can."""
        checks = (
            (cls.supports_head_size(head_size), f"head size {head_size} is not supported"),
            (cls.supports_dtype(dtype), f"dtype {dtype} is not supported"),
            (cls.supports_kv_cache_dtype(kv_cache_dtype), f"KV cache dtype {kv_cache_dtype} is not supported"),
            (cls.supports_block_size(block_size), f"block size {block_size} is not supported"),
            (cls.supports_attn_type(attn_type), f"attention type {attn_type!s} is not supported"),
            (not use_mla or cls.is_mla(), "latent attention is not supported"),
            (use_mla or not cls.is_mla(), "only latent attention is supported"),
            (not use_sparse or cls.is_sparse(), "sparse attention is not supported"),
            (use_sparse or not cls.is_sparse(), "only sparse attention is supported"),
            (
                device_capability is None or cls.supports_compute_capability(device_capability),
                f"compute capability {device_capability} is not supported",
            ),
            (not has_sink or cls.supports_sink(), "attention sinks are not supported"),
            (not use_mm_prefix or cls.supports_mm_prefix(), "bidirectional media are not supported"),
            (
                not use_per_head_quant_scales or cls.supports_per_head_quant_scales(),
                "quantisation scales per head are not supported",
            ),
            (not has_sliding_window or cls.supports_sliding_window(), "a sliding window is not supported"),
            (not use_non_causal or cls.supports_non_causal(), "non-causal attention is not supported"),
            (not use_batch_invariant or cls.supports_batch_invariance(), "batch invariance is not supported"),
            (not use_kv_connector or cls.supports_kv_connector(), "KV connectors are not supported"),
            (not use_pcp or cls.supports_pcp(), "prefill context parallelism is not supported"),
            (not use_dcp or cls.supports_dcp(), "decode context parallelism is not supported"),
            (not use_adaptive_verification, "adaptive verification is not supported"),
            (not use_rswa or cls.supports_rswa(), "R-SWA layers are not supported"),
        )
        reasons = [reason for passed, reason in checks if not passed]
        combined = cls.supports_combination(
            head_size=head_size,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            block_size=block_size,
            use_mla=use_mla,
            has_sink=has_sink,
            use_sparse=use_sparse,
            device_capability=device_capability,
        )
        return [*reasons, combined] if combined else reasons


class AttentionLayerBase(ABC):
    """A layer that keeps something per token in the KV cache.

    The worker finds it in `compilation_config.static_forward_context`, asks it for its spec and
    hands it its part of the cache.
    """

    impl: Any

    @abstractmethod
    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend it computes with."""

    @abstractmethod
    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """What it stores; None = nothing of its own."""

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Take this layer's part of the cache."""
        self.kv_cache = kv_cache
