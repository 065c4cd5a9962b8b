"""Settling what the configuration says about LoRA adapters."""

from __future__ import annotations

from typing import Any

from hardpoint.config.sections import LoRAConfig, VllmConfig, near_miss
from hardpoint.errors import ConfigError

DTYPES = ("auto", "float16", "bfloat16")
# Of the arguments, those that say something only where there are adapters.
_NEED_ADAPTERS = ("max_loras", "max_lora_rank", "lora_dtype", "max_cpu_loras", "lora_target_modules")


def settle_adapters(config: VllmConfig, platform: Any) -> None:
    """Complete `lora_config`; ConfigError for a model without adapters and for limits that contradict each other."""
    adapters = config.lora_config
    if adapters is None:
        return
    if not config.model_config.declares("supports_lora"):
        raise ConfigError(
            f"{config.model_config.architecture} does not support LoRA adapters",
            code="lora-model",
            fix="leave --enable-lora out, or serve a model that supports them",
        )
    name = str(adapters.lora_dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(
            f"lora_config.lora_dtype is {name!r}: expected one of {', '.join(DTYPES)}{near_miss(name, DTYPES)}",
            code="config-value",
        )
    adapters.lora_dtype = name
    if adapters.max_cpu_loras is None:
        adapters.max_cpu_loras = adapters.max_loras
    elif adapters.max_cpu_loras < adapters.max_loras:
        raise ConfigError(
            f"max_cpu_loras={adapters.max_cpu_loras} is less than max_loras={adapters.max_loras}",
            code="config-value",
            fix="keep at least as many adapters in memory as there are in a batch",
        )


def adapters_section(engine_args: Any, given: dict[str, Any]) -> LoRAConfig | None:
    """The section for what was given; None without `enable_lora`. ConfigError for settings that would do nothing."""
    if engine_args.enable_lora:
        return LoRAConfig(**given)
    fields = type(engine_args).__dataclass_fields__
    for name in _NEED_ADAPTERS:
        if getattr(engine_args, name) != fields[name].default:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} says nothing without --enable-lora", code="flag-missing", fix="add --enable-lora"
            )
    return None
