"""The whole configuration of one engine."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import Any

from hardpoint.config.sections.base import NonNegative, Section, derived
from hardpoint.config.sections.cache import CacheConfig
from hardpoint.config.sections.compilation import (
    AttentionConfig,
    CompilationConfig,
    KernelConfig,
    MambaConfig,
    OptimizationLevel,
)
from hardpoint.config.sections.features import (
    AuxOutputConfig,
    DiffusionConfig,
    EngramConfig,
    ReasoningConfig,
    SpeculativeConfig,
    StructuredOutputsConfig,
    WatermarkConfig,
)
from hardpoint.config.sections.load import (
    DeviceConfig,
    LoadConfig,
    LoRAConfig,
    OffloadConfig,
    PluginsConfig,
    WeightTransferConfig,
)
from hardpoint.config.sections.model import ModelConfig
from hardpoint.config.sections.observability import LoggingConfig, ObservabilityConfig, ProfilerConfig
from hardpoint.config.sections.parallel import ParallelConfig
from hardpoint.config.sections.scheduler import SchedulerConfig
from hardpoint.config.sections.transfer import (
    ECTransferConfig,
    EncoderCacheManagerConfig,
    KVEventsConfig,
    KVTransferConfig,
)
from hardpoint.extensions.refs import load_ref


class _Sealing(type):
    """Seals a configuration once it is made, which is after whatever a plugin wrapped around `__post_init__`."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        config = super().__call__(*args, **kwargs)
        load_ref("hardpoint.config.resolve:seal")(config)
        return config


@dataclass
class VllmConfig(Section, metaclass=_Sealing):
    """All sections. Making one settles it: `config.resolve` runs its steps, then the result is sealed.

    model_config None skips the steps that need a model (tests, tools).
    """

    model_config: ModelConfig = None  # type: ignore[assignment]
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig.default_factory)
    device_config: DeviceConfig = field(default_factory=DeviceConfig)
    load_config: LoadConfig = field(default_factory=LoadConfig)
    offload_config: OffloadConfig = field(default_factory=OffloadConfig)
    attention_config: AttentionConfig = field(default_factory=AttentionConfig)
    aux_output_config: AuxOutputConfig = field(default_factory=AuxOutputConfig)
    engram_config: EngramConfig | None = None
    mamba_config: MambaConfig = field(default_factory=MambaConfig)
    kernel_config: KernelConfig = field(default_factory=KernelConfig)
    lora_config: LoRAConfig | None = None
    speculative_config: SpeculativeConfig | None = None
    watermark_config: WatermarkConfig | None = None
    diffusion_config: DiffusionConfig | None = None
    structured_outputs_config: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    observability_config: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    logging_config: LoggingConfig = field(default_factory=LoggingConfig)
    quant_config: Any = None
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    profiler_config: ProfilerConfig = field(default_factory=ProfilerConfig)
    kv_transfer_config: KVTransferConfig | None = None
    kv_events_config: KVEventsConfig | None = None
    ec_transfer_config: ECTransferConfig | None = None
    ec_manager_config: EncoderCacheManagerConfig = field(default_factory=EncoderCacheManagerConfig)
    reasoning_config: ReasoningConfig | None = None
    additional_config: Any = field(default_factory=dict)
    instance_id: str = ""
    optimization_level: Any = OptimizationLevel.O2
    performance_mode: str = "balanced"
    weight_transfer_config: WeightTransferConfig | None = None
    shutdown_timeout: NonNegative = 0
    plugins_config: PluginsConfig = field(default_factory=PluginsConfig)

    is_settled: bool = derived(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        load_ref("hardpoint.config.resolve:settle")(self)

    def sections(self) -> dict[str, Section]:
        """Return the sections that are present, by field name."""
        values = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {name: value for name, value in values if isinstance(value, Section)}

    def compute_hash(self, include_version: bool = True) -> str:
        """Return a digest of the values; equal for engines that are configured alike."""
        return load_ref("hardpoint.config.wire:digest")(self, include_version)

    def with_hf_config(self, hf_config: Any, architectures: list[str] | None = None) -> VllmConfig:
        """Return a copy whose model has other facts, for a part of a larger model."""
        if architectures is not None:
            hf_config = copy.deepcopy(hf_config)
            hf_config.architectures = architectures
        model = copy.copy(self.model_config)
        model.__dict__.pop("_journal", None)
        model.hf_config = hf_config
        model.hf_text_config = getattr(hf_config, "text_config", None) or hf_config
        changed = copy.copy(self)
        changed.__dict__.pop("_journal", None)
        changed.model_config = model
        return changed

    @staticmethod
    def get_quantization_config(model_config: ModelConfig, load_config: LoadConfig) -> Any:
        """Return the quantisation object of a model, None when its weights are plain (worker processes)."""
        return load_ref("hardpoint.worker.quantization.resolve:get_quant_config")(model_config, load_config)

    @property
    def max_concurrent_batches(self) -> int:
        """Steps in flight at once."""
        pipeline = self.parallel_config.pipeline_parallel_size
        return max(pipeline, 2) if self.scheduler_config.async_scheduling else pipeline

    @property
    def max_in_flight_tokens(self) -> int:
        """Tokens in all steps in flight together."""
        return self.max_concurrent_batches * self.scheduler_config.max_num_batched_tokens

    @property
    def num_speculative_tokens(self) -> int:
        """Draft tokens per step."""
        config = self.speculative_config
        return (config.num_speculative_tokens or 0) if config is not None else 0

    @property
    def num_lookahead_tokens(self) -> int:
        """Cache slots kept ahead of a request for drafts."""
        return self.num_speculative_tokens

    @property
    def uniform_decode_query_len(self) -> int:
        """Tokens per request in a decode-only step."""
        return 1 + self.num_speculative_tokens

    @property
    def use_v2_model_runner(self) -> bool:
        """Always: there is one runner."""
        return True

    @property
    def needs_dp_coordinator(self) -> bool:
        """Whether data-parallel replicas must keep pace with each other."""
        return self.parallel_config.data_parallel_size > 1
