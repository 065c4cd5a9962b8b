"""Which quantisation a checkpoint has, and the object that knows its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hardpoint import platforms
from hardpoint.config.model_facts import read_json
from hardpoint.config.sections import LoadConfig, ModelConfig
from hardpoint.contracts.quantization import QuantizationConfig
from hardpoint.errors import ConfigError
from hardpoint.extensions.registry import registry
from hardpoint.worker.quantization.registry import get_quantization_config


def get_quant_config(model_config: ModelConfig, load_config: LoadConfig) -> QuantizationConfig | None:
    """The quantisation of a model; None when its weights are plain.

    Raises ConfigError (a ValueError): an unknown method, one that is not what the checkpoint says, or
    one that cannot run on this device or with this activation type.
    """
    stated = _stated(model_config)
    method = _method(model_config, stated)
    if method is None:
        return None
    platforms.current_platform.verify_quantization(method)
    cls = get_quantization_config(method)
    registry("quantization_methods").note_use(method, "keeps the weights")
    config = cls.from_config(_settings(cls, stated, model_config))
    _check_device(config, method)
    _check_dtype(config, method, model_config.dtype)
    config.maybe_update_config(model_config.model, hf_config=model_config.hf_config, revision=model_config.revision)
    return config


def _stated(model_config: ModelConfig) -> dict[str, Any] | None:
    for name in ("quantization_config", "compression_config"):
        found = getattr(model_config.hf_config, name, None)
        if found is not None:
            return dict(found) if isinstance(found, dict) else found.to_dict()
    return None


def _method(model_config: ModelConfig, stated: dict[str, Any] | None) -> str | None:
    chosen = model_config.quantization.lower() if model_config.quantization else None
    claimed = _claimed(stated, chosen, model_config.hf_config)
    if claimed is not None:
        return claimed
    found = str(stated.get("quant_method", "")).lower() if stated else ""
    if chosen and found and chosen != found:
        raise ConfigError(
            f"Quantization method specified in the model config ({found}) does not match the one of "
            f"the `quantization` argument ({chosen})",
            code="config-quantization",
            fix="leave --quantization out",
        )
    return chosen or found or None


def _claimed(stated: dict[str, Any] | None, chosen: str | None, hf_config: Any) -> str | None:
    """The method that claims the checkpoint for itself; plugins are asked before what is built in."""
    if stated is None:
        return None
    for entry in sorted(registry("quantization_methods").entries(), key=lambda entry: entry.built_in):
        claimed = entry.load().override_quantization_method(stated, chosen, hf_config=hf_config)
        if claimed is not None:
            return claimed
    return None


def _settings(
    cls: type[QuantizationConfig], stated: dict[str, Any] | None, model_config: ModelConfig
) -> dict[str, Any]:
    if stated is not None:
        return stated
    folder = Path(model_config.local_path)
    files = (folder / name for name in cls.get_config_filenames())
    found = next((file for file in files if file.is_file()), None)
    return {} if found is None else read_json(found)


def _check_device(config: QuantizationConfig, method: str) -> None:
    capability = platforms.current_platform.get_device_capability()
    if capability is not None and capability.to_int() < config.get_min_capability():
        raise ConfigError(
            f"The quantization method {method} is not supported for the current GPU. "
            f"Minimum capability: {config.get_min_capability()}. Current capability: {capability.to_int()}.",
            code="config-quantization",
        )


def _check_dtype(config: QuantizationConfig, method: str, dtype: Any) -> None:
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    supported = config.get_supported_act_dtypes()
    if wanted not in supported:
        raise ConfigError(
            f"{wanted} is not supported for quantization method {method}. Supported dtypes: {supported}",
            code="config-quantization",
            fix="choose one of them with --dtype",
        )
