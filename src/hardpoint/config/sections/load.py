"""Sections about devices, weights on disk and weights in host memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from hardpoint.config.sections.base import NonNegative, Options, Positive, Processes, Section, derived

SafetensorsLoadStrategy = Literal["lazy", "eager", "prefetch", "torchao"]
MaxLoRARanks = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]
LoRADType = Literal["auto", "float16", "bfloat16"]
OffloadBackend = Literal["auto", "uva", "prefetch"]


@dataclass
class DeviceConfig(Section):
    """The device kind; `cpu_threads` is ours: threads for kernels in each worker, None = by platform."""

    device: Any = "auto"
    cpu_threads: Processes | None = None

    device_type: str = derived("")


@dataclass
class LoadConfig(Section):
    """Where weights come from and how they are read."""

    load_format: str = "auto"
    download_dir: str | None = None
    safetensors_load_strategy: SafetensorsLoadStrategy | None = None
    safetensors_prefetch_num_threads: Processes = 8
    safetensors_prefetch_block_size: Positive = 16 * 1024 * 1024
    model_loader_extra_config: Any = field(default_factory=dict)
    device: str | None = None
    ignore_patterns: list[str] | str = field(default_factory=lambda: ["original/**/*"])
    use_tqdm_on_load: bool = True
    pt_load_map_location: str | dict[str, str] = "cpu"


@dataclass
class LoRAConfig(Section):
    """Adapters in memory at a time."""

    max_lora_rank: MaxLoRARanks = 16
    max_loras: Positive = 1
    fully_sharded_loras: bool = False
    max_cpu_loras: Positive | None = None
    lora_dtype: Any = "auto"
    target_modules: list[str] | None = None
    default_mm_loras: dict[str, str] | None = None
    enable_tower_connector_lora: bool = False
    specialize_active_lora: bool = False
    max_lora_cls_labels: Positive | None = None


@dataclass
class UVAOffloadConfig(Section):
    """Weights read from host memory by the device; sizes in GiB."""

    cpu_offload_gb: Annotated[float, msgspec.Meta(ge=0)] = 0
    cpu_offload_params: set[str] = field(default_factory=set)


@dataclass
class PrefetchOffloadConfig(Section):
    """Layers kept in host memory and copied ahead of use."""

    offload_group_size: NonNegative = 0
    offload_num_in_group: Positive = 1
    offload_prefetch_step: NonNegative = 1
    offload_params: set[str] = field(default_factory=set)


@dataclass
class OffloadConfig(Section):
    """Weight offload to host memory."""

    offload_backend: OffloadBackend = "auto"
    uva: UVAOffloadConfig = field(default_factory=UVAOffloadConfig)
    prefetch: PrefetchOffloadConfig = field(default_factory=PrefetchOffloadConfig)


@dataclass
class WeightTransferConfig(Section):
    """Weight updates from a trainer."""

    backend: str = "nccl"


@dataclass
class PluginsConfig(Section):
    """Hardpoint's own: what to do when a plugin fails, and each plugin's settings by name."""

    policy: Literal["compatible", "strict"] = "compatible"
    settings: dict[str, Options] = field(default_factory=dict, repr=False)
