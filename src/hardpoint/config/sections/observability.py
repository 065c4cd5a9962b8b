"""Sections about metrics, logs and profiles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hardpoint.config.sections.base import NonNegative, Section, Share
from hardpoint.env import envs

DetailedTraceModules = Literal["model", "worker", "all"]
LogLevel = Literal["CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET"]
ProfilerKind = Literal["torch", "cuda", "proton"]
TorchProfilerActivity = Literal["CPU", "CUDA", "PrivateUse1", "XPU"]


@dataclass
class ObservabilityConfig(Section):
    """Metrics and traces."""

    show_hidden_metrics_for_version: str | None = None
    otlp_traces_endpoint: str | None = None
    collect_detailed_traces: list[DetailedTraceModules] | None = None
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = "none"
    kv_cache_metrics: bool = False
    kv_cache_metrics_sample: Share = 0.01
    custom_histogram_buckets: dict[str, list[float]] | None = None
    cudagraph_metrics: bool = False
    enable_layerwise_nvtx_tracing: bool = False
    enable_mfu_metrics: bool = False
    enable_mm_processor_stats: bool = False
    enable_logging_iteration_details: bool = False
    jit_monitor_mode: Literal["warn", "error"] = "warn"
    jit_monitor_verbose: bool = False


@dataclass
class LoggingConfig(Section):
    """How each process logs; defaults come from the VLLM_LOGGING_* variables."""

    log_level: LogLevel = field(default_factory=lambda: envs.VLLM_LOGGING_LEVEL.upper())
    formatter: Literal["text", "json"] = "text"
    configure_logging: bool = field(default_factory=lambda: envs.VLLM_CONFIGURE_LOGGING)
    pylogging_config_file: str | None = field(default_factory=lambda: envs.VLLM_LOGGING_CONFIG_PATH)


@dataclass
class ProfilerConfig(Section):
    """Profiles recorded on request; `delay_iterations` and `max_iterations` count engine steps, 0 = no limit."""

    profiler: ProfilerKind | None = None
    torch_profiler_dir: str = ""
    torch_profiler_activities: list[TorchProfilerActivity] | None = None
    torch_profiler_with_stack: bool = True
    torch_profiler_with_flops: bool = False
    torch_profiler_use_gzip: bool = True
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    ignore_frontend: bool = False
    delay_iterations: NonNegative = 0
    max_iterations: NonNegative = 0
