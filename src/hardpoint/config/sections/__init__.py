"""The sections of the configuration, with vLLM's names. No torch here."""

from hardpoint.config.sections.base import Section, from_mapping, near_miss
from hardpoint.config.sections.cache import CacheConfig, CacheDType
from hardpoint.config.sections.compilation import (
    AttentionConfig,
    CompilationConfig,
    CompilationMode,
    CUDAGraphMode,
    DynamicShapesConfig,
    KernelConfig,
    MambaConfig,
    OptimizationLevel,
    PassConfig,
)
from hardpoint.config.sections.features import (
    AuxOutputConfig,
    DiffusionConfig,
    EngramConfig,
    MultiModalConfig,
    PoolerConfig,
    ReasoningConfig,
    SpeculativeConfig,
    SpeechToTextConfig,
    StructuredOutputsConfig,
    WatermarkConfig,
)
from hardpoint.config.sections.load import (
    DeviceConfig,
    LoadConfig,
    LoRAConfig,
    OffloadConfig,
    PluginsConfig,
    PrefetchOffloadConfig,
    UVAOffloadConfig,
    WeightTransferConfig,
)
from hardpoint.config.sections.model import DEFAULT_MODEL, ModelClass, ModelConfig
from hardpoint.config.sections.observability import LoggingConfig, ObservabilityConfig, ProfilerConfig
from hardpoint.config.sections.parallel import EPLBConfig, FaultToleranceConfig, ParallelConfig
from hardpoint.config.sections.scheduler import SchedulerConfig
from hardpoint.config.sections.transfer import (
    ECTransferConfig,
    EncoderCacheManagerConfig,
    KVEventsConfig,
    KVTransferConfig,
)
from hardpoint.config.sections.vllm import VllmConfig

__all__ = [
    "DEFAULT_MODEL",
    "AttentionConfig",
    "AuxOutputConfig",
    "CUDAGraphMode",
    "CacheConfig",
    "CacheDType",
    "CompilationConfig",
    "CompilationMode",
    "DeviceConfig",
    "DiffusionConfig",
    "DynamicShapesConfig",
    "ECTransferConfig",
    "EPLBConfig",
    "EncoderCacheManagerConfig",
    "EngramConfig",
    "FaultToleranceConfig",
    "KVEventsConfig",
    "KVTransferConfig",
    "KernelConfig",
    "LoRAConfig",
    "LoadConfig",
    "LoggingConfig",
    "MambaConfig",
    "ModelClass",
    "ModelConfig",
    "MultiModalConfig",
    "ObservabilityConfig",
    "OffloadConfig",
    "OptimizationLevel",
    "ParallelConfig",
    "PassConfig",
    "PluginsConfig",
    "PoolerConfig",
    "PrefetchOffloadConfig",
    "ProfilerConfig",
    "ReasoningConfig",
    "SchedulerConfig",
    "Section",
    "SpeculativeConfig",
    "SpeechToTextConfig",
    "StructuredOutputsConfig",
    "UVAOffloadConfig",
    "VllmConfig",
    "WatermarkConfig",
    "WeightTransferConfig",
    "from_mapping",
    "near_miss",
]
