"""A whole configuration, as plugins get it, for the tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hardpoint.config.engine_args import EngineArgs
from hardpoint.config.sections import VllmConfig
from hardpoint.testing.tiny_llama import tiny_model


def tiny_vllm_config(model: Path | str | None = None, **arguments: Any) -> VllmConfig:
    """What `LLM(model, **arguments)` would make; the tiny model and a small cache unless told otherwise."""
    given = {"max_model_len": 128, "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20, **arguments}
    return EngineArgs(model=str(model or tiny_model()), **given).create_engine_config("script")
