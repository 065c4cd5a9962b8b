"""Hardpoint: an LLM inference server whose every replaceable part is a declared extension point."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

# Public names, imported on first use so that `import hardpoint` stays light.
_LAZY = {
    "LLM": "hardpoint.llm:LLM",
    "AsyncLLM": "hardpoint.front_end.async_llm:AsyncLLM",
    "LLMEngine": "hardpoint.front_end.llm_engine:LLMEngine",
    "EngineClient": "hardpoint.contracts.engine_client:EngineClient",
    "EngineArgs": "hardpoint.config.engine_args:EngineArgs",
    "AsyncEngineArgs": "hardpoint.config.engine_args:AsyncEngineArgs",
    "SamplingParams": "hardpoint.types.sampling_params:SamplingParams",
    "PoolingParams": "hardpoint.types.pooling_params:PoolingParams",
    "RequestOutput": "hardpoint.types.outputs:RequestOutput",
    "CompletionOutput": "hardpoint.types.outputs:CompletionOutput",
}
__all__ = sorted([*_LAZY, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'hardpoint' has no attribute {name!r}")
    from hardpoint.extensions.refs import load_ref  # noqa: PLC0415 - keep `import hardpoint` light

    return load_ref(_LAZY[name])
