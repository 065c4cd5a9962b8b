"""Whether a front end and an engine that were started apart were started for the same thing.

The engine decides, by `EngineFacts` of both. The model must be the same, by its files rather than by its
path. An engine flag that the front end's command gives must have the engine's value, since the front
end cannot honour it; one that it leaves out is the engine's choice, except where both act on it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from hardpoint import __version__
from hardpoint.config.flags import ENGINE_FLAGS, Flag
from hardpoint.config.gguf_file import part_names
from hardpoint.config.hf_config import HFConfig
from hardpoint.config.sections import ModelConfig, VllmConfig
from hardpoint.types.link import EngineFacts

# Each side has its own: places of files, what only a front end acts on, logs, plugins.
OWN = frozenset({
    "tokenizer", "tokenizer_mode", "trust_remote_code", "revision", "tokenizer_revision", "skip_tokenizer_init",
    "served_model_name", "hf_token", "generation_config", "override_generation_config", "download_dir",
    "ignore_patterns", "use_tqdm_on_load", "data_parallel_size_local", "data_parallel_address",
    "data_parallel_rpc_port", "max_num_queued_reqs", "max_num_queued_tokens", "stream_interval", "request_timeout",
    "custom_histogram_buckets", "logging_config", "log_level", "log_config_file", "disable_log_stats",
    "aggregate_engine_logging", "enable_log_requests", "enable_log_outputs", "enable_log_deltas", "max_log_len",
    "shutdown_timeout", "fail_on_environ_validation", "plugin_policy", "plugin_config",
})  # fmt: skip
# Both act on them: the front end checks requests against them or shows what the engine measures.
BOTH = frozenset({"hf_overrides", "max_logprobs", "scheduling_policy", "logits_processors", "kv_cache_metrics"})
_WEIGHTS = ("*.safetensors", "*.gguf")
_SAMPLE_BYTES = 1 << 16


def facts_of(engine_args: Any, vllm_config: VllmConfig) -> EngineFacts:
    """What an engine with these arguments is, or a front end expects of it.

    engine_args  the `EngineArgs` from which the configuration was made
    """
    model = vllm_config.model_config
    return EngineFacts(
        version=__version__,
        model=str(model.model),
        config=_digest(model.hf_config.to_dict() if isinstance(model.hf_config, HFConfig) else {}),
        weights=_weights(model),
        flags={flag.dest: _digest(getattr(engine_args, flag.dest)) for flag in _given(engine_args)},
    )


def _given(engine_args: Any) -> list[Flag]:
    return [flag for flag in ENGINE_FLAGS if flag.dest not in OWN and getattr(engine_args, flag.dest) != flag.default]


def difference(engine: EngineFacts, front_end: EngineFacts) -> str | None:
    """Why the engine cannot serve this front end, in words; None when it can."""
    if engine.version != front_end.version:
        return f"the engine is Hardpoint {engine.version}, the front end {front_end.version}"
    flags = _other_flags(engine.flags, front_end.flags)
    if flags:
        return f"the engine was started with another value of {', '.join(flags)} than the front end"
    if engine.config != front_end.config or not _same_weights(engine, front_end):
        return f"the engine serves another model: {engine.model}, while the front end was started for {front_end.model}"
    return None


def _same_weights(engine: EngineFacts, front_end: EngineFacts) -> bool:
    if engine.weights and front_end.weights:
        return engine.weights == front_end.weights
    # The front end's machine need not have the weights. Then the name has to do.
    return engine.model == front_end.model


def _other_flags(engine: dict[str, str], front_end: dict[str, str]) -> list[str]:
    asked = sorted({*front_end, *(BOTH & engine.keys())})
    return ["--" + name.replace("_", "-") for name in asked if engine.get(name) != front_end.get(name)]


def _digest(value: Any) -> str:
    return _short(msgspec.msgpack.encode(value, order="deterministic", enc_hook=str))


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _weights(model: ModelConfig) -> str:
    """Digest of the names, sizes and some bytes of the weight files; enough to tell two fine-tunings apart."""
    parts: list[bytes] = []
    for path in _weight_files(Path(model.local_path or model.model)):
        size = path.stat().st_size
        parts.append(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for place in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                file.seek(place)
                parts.append(file.read(_SAMPLE_BYTES))
    return _short(b"".join(parts)) if parts else ""


def _weight_files(place: Path) -> list[Path]:
    if place.is_file():
        return [part for part in (place.with_name(name) for name in part_names(place.name)) if part.is_file()]
    return sorted(path for pattern in _WEIGHTS for path in place.glob(pattern) if path.is_file())
