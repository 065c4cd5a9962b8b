"""Calls a model's constructor the way it wants to be called, and says what became of the custom ops."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from hardpoint.config.current import set_current_vllm_config
from hardpoint.config.sections import ModelConfig, VllmConfig
from hardpoint.contracts.custom_op import build_log
from hardpoint.contracts.model import bind_quant_config
from hardpoint.log import init_logger
from hardpoint.worker.models.op_report import custom_op_log_check
from hardpoint.worker.models.registry import get_model_architecture

logger = init_logger(__name__)


def initialize_model(
    vllm_config: VllmConfig,
    *,
    prefix: str = "",
    model_class: type[nn.Module] | None = None,
    model_config: ModelConfig | None = None,
) -> nn.Module:
    """Build a model with uninitialised weights.

    model_class  the class to build; that of the model's architecture unless given
    A constructor that does not take `vllm_config` and `prefix` is warned about and given what it names.
    """
    config = model_config or vllm_config.model_config
    cls = model_class or get_model_architecture(config)[0]
    if vllm_config.quant_config is not None:
        bind_quant_config(vllm_config.quant_config, cls)
    nested = prefix != ""
    if not nested:
        build_log.clear()
    with set_current_vllm_config(vllm_config, check_compile=True, prefix=prefix):
        model = cls(**_constructor_arguments(cls, vllm_config, config, prefix))
    if not nested:
        custom_op_log_check(vllm_config)
    return model


def _constructor_arguments(
    cls: type[nn.Module], vllm_config: VllmConfig, model_config: ModelConfig, prefix: str
) -> dict[str, Any]:
    names = inspect.signature(cls.__init__).parameters
    if ("vllm_config" in names and "prefix" in names) or _takes_anything(names):
        return {"vllm_config": vllm_config, "prefix": prefix}
    message = (
        f"the constructor of {cls.__qualname__} should take `vllm_config` and `prefix`. "
        "Trying to guess the arguments for old-style model class"
    )
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    logger.warning("%s", message)
    offered = {
        "prefix": prefix,
        "config": model_config.hf_config,
        "cache_config": vllm_config.cache_config,
        "quant_config": vllm_config.quant_config,
        "lora_config": vllm_config.lora_config,
        "scheduler_config": vllm_config.scheduler_config,
    }
    return {name: value for name, value in offered.items() if name in names}


def _takes_anything(names: Mapping[str, inspect.Parameter]) -> bool:
    """Whether a constructor passes on whatever it gets, as a plugin's wrapper around one does."""
    kinds = [parameter.kind for name, parameter in names.items() if name != "self"]
    return inspect.Parameter.VAR_KEYWORD in kinds and all(
        kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL) for kind in kinds
    )
