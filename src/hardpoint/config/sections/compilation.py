"""Sections about kernels and graph compilation."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from hardpoint.config.sections.base import NonNegative, Options, Section, derived
from hardpoint.errors import ConfigError


class CompilationMode(enum.IntEnum):
    """How much of a model is compiled."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


class CUDAGraphMode(enum.Enum):
    """Which parts of a step are captured in device graphs; a pair is (decode, mixed)."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)

    def decode_mode(self) -> CUDAGraphMode:
        """Return the mode of decode-only batches."""
        return CUDAGraphMode(self.value[0]) if isinstance(self.value, tuple) else self

    def mixed_mode(self) -> CUDAGraphMode:
        """Return the mode of all other batches."""
        return CUDAGraphMode(self.value[1]) if isinstance(self.value, tuple) else self

    def has_full_cudagraphs(self) -> bool:
        """Whether any batch uses one graph for the whole step."""
        return CUDAGraphMode.FULL in (self.decode_mode(), self.mixed_mode())

    def has_piecewise_cudagraphs(self) -> bool:
        """Whether any batch uses a graph per piece."""
        return CUDAGraphMode.PIECEWISE in (self.decode_mode(), self.mixed_mode())


class OptimizationLevel(enum.IntEnum):
    """`-O0` to `-O3`."""

    O0 = 0
    O1 = 1
    O2 = 2
    O3 = 3


@dataclass
class PassConfig(Section):
    """Fusion switches; None = by optimisation level."""

    fuse_norm_quant: bool | None = None
    fuse_act_quant: bool | None = None
    fuse_attn_quant: bool | None = None
    eliminate_noops: bool = True
    fuse_allreduce_rms: bool | None = None
    enable_qk_norm_rope_fusion: bool | None = None
    fuse_rope_kvcache: bool | None = None


@dataclass
class DynamicShapesConfig(Section):
    """How compiled code treats sizes that vary."""

    type: Literal["backed", "unbacked", "backed_size_oblivious"] = "backed"
    evaluate_guards: bool = False
    assume_32_bit_indexing: bool = True


@dataclass
class CompilationConfig(Section):
    """Graph compilation and the switches of custom ops.

    mode        CompilationMode or its number; None until the platform decides
    custom_ops  `all` or `none` as the base, `+name` and `-name` for single ops
    """

    mode: Any = None
    debug_dump_path: str | None = None
    cache_dir: str = ""
    compile_cache_save_format: Literal["binary", "unpacked"] = "binary"
    backend: str = ""
    custom_ops: list[str] = field(default_factory=list)
    ir_enable_torch_wrap: bool | None = None
    splitting_ops: list[str] | None = None
    compile_mm_encoder: bool = False
    cudagraph_mm_encoder: bool = False
    compile_sizes: list[int | str] | None = None
    compile_ranges_endpoints: list[int] | None = None
    inductor_compile_config: Options = field(default_factory=dict)
    inductor_passes: dict[str, str] = field(default_factory=dict)
    cudagraph_mode: Any = None
    cudagraph_num_of_warmups: NonNegative = 0
    cudagraph_capture_sizes: list[int] | None = None
    cudagraph_copy_inputs: bool = False
    cudagraph_specialize_lora: bool = True
    use_inductor_graph_partition: bool | None = None
    pass_config: PassConfig = field(default_factory=PassConfig)
    max_cudagraph_capture_size: int | None = None
    dynamic_shapes_config: DynamicShapesConfig = field(default_factory=DynamicShapesConfig)
    fast_moe_cold_start: bool | None = None

    local_cache_dir: str | None = derived()
    enabled_custom_ops: Any = field(default_factory=Counter, init=False)
    disabled_custom_ops: Any = field(default_factory=Counter, init=False)
    compilation_time: float = derived(0.0)
    static_forward_context: Any = field(default_factory=dict, init=False)
    static_all_moe_layers: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mode = _member(CompilationMode, self.mode, "compilation_config.mode")
        self.cudagraph_mode = _member(CUDAGraphMode, self.cudagraph_mode, "compilation_config.cudagraph_mode")
        self.check_custom_ops()

    def check_custom_ops(self) -> None:
        """Hold the list of op switches against its grammar; raises `ConfigError`."""
        names = set(self.custom_ops)
        for entry in self.custom_ops:
            if entry not in ("all", "none") and (entry[:1] not in ("+", "-") or len(entry) < 2):
                raise ConfigError(
                    f"compilation_config.custom_ops holds {entry!r}: expected all, none, +name or -name",
                    code="config-value",
                )
            if entry[:1] == "+" and f"-{entry[1:]}" in names:
                raise ConfigError(
                    f"compilation_config.custom_ops both enables and disables {entry[1:]!r}", code="config-value"
                )
        if {"all", "none"} <= names:
            raise ConfigError("compilation_config.custom_ops holds both all and none", code="config-value")

    def is_custom_op_enabled(self, op: str) -> bool:
        """Whether the op called `op` runs its device implementation instead of the native one."""
        if f"+{op}" in self.custom_ops:
            return True
        return "all" in self.custom_ops and f"-{op}" not in self.custom_ops

    def enable_custom_op(self, name: str) -> None:
        """Add `+name` once; for platform hooks, which run more than once."""
        if f"+{name}" not in self.custom_ops:
            self.custom_ops = [*self.custom_ops, f"+{name}"]

    def splitting_ops_contain_attention(self) -> bool:
        """Whether the graph is cut at attention."""
        return any("attention" in op for op in self.splitting_ops or ())


def _member(kind: type[enum.Enum], value: Any, where: str) -> Any:
    """Accept a member, its name or its value."""
    if value is None or isinstance(value, kind):
        return value
    for member in kind:
        if value in (member.name, member.name.lower(), member.value) or value == str(member.value):
            return member
    raise ConfigError(f"{where} is {value!r}: expected one of {', '.join(m.name for m in kind)}", code="config-value")


@dataclass
class AttentionConfig(Section):
    """The choice of attention backends; None or "auto" = by platform."""

    backend: str | None = None
    backend_per_kind: dict[str, str] = field(default_factory=dict)
    flash_attn_version: Literal[2, 3, 4] | None = None
    flash_attn_max_num_splits_for_cuda_graph: int = 32
    use_prefill_query_quantization: bool = False
    use_non_causal: bool = False
    flex_attn_block_m: int | None = None
    flex_attn_block_n: int | None = None


@dataclass
class KernelConfig(Section):
    """The choice of kernels."""

    ir_op_priority: dict[str, list[str]] = field(default_factory=dict)
    enable_jit_warmup: bool = True
    moe_backend: str = "auto"
    linear_backend: str = "auto"
    linear_backend_per_quant: dict[str, str] | None = None


@dataclass
class MambaConfig(Section):
    """State-space kernels."""

    backend: Literal["triton", "flashinfer", "cpu"] = "triton"
