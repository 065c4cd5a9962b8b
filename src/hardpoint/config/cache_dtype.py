"""The number format of the KV cache: its names, and what `auto` means."""

from __future__ import annotations

from typing import Any

from hardpoint.config.sections import VllmConfig, near_miss
from hardpoint.env import envs
from hardpoint.errors import ConfigError

# Formats of the built-in backends. int8_per_token_head: int8 with a factor for each head of each token.
NAMES = ("auto", "float32", "float16", "bfloat16", "int8_per_token_head")
_SHORT = {"int8": "int8_per_token_head", "half": "float16", "float": "float32"}


def choose_cache_dtype(config: VllmConfig, platform: Any) -> None:
    """Settle `cache_config.cache_dtype`; ConfigError for a name that is not known.

    Where weights stay quantised on a CPU and activations are rounded anyway, `auto` is float16: half the memory to
    read for each token. Who names `--dtype float32` gets the model's own format.
    """
    cache = config.cache_config
    name = _SHORT.get(cache.cache_dtype, cache.cache_dtype)
    if name not in NAMES:
        raise ConfigError(
            f"cache_config.cache_dtype is {name!r}: expected one of {', '.join(NAMES)}{near_miss(name, NAMES)}",
            code="config-cache-dtype",
            fix="choose another --kv-cache-dtype",
        )
    rounds = config.model_config.quantization == "gguf" and config.kernel_config.linear_backend == "auto"
    rounds = rounds and envs.HARDPOINT_CPU_KERNELS != "off"
    if name == "auto" and rounds and platform.device_type == "cpu" and not config.is_settled:
        name = "float16"
    cache.cache_dtype = name
