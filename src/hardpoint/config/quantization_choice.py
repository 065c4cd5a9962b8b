"""Which quantisation a checkpoint has: the user's word, the files', or that of a plugin's method that claims them."""

from __future__ import annotations

from typing import Any

from hardpoint.config.sections import ModelConfig, VllmConfig, near_miss
from hardpoint.errors import ConfigError
from hardpoint.extensions.registry import registry
from hardpoint.log import init_logger

logger = init_logger(__name__)


def choose_quantization(config: VllmConfig, platform: Any) -> None:
    """Settle `model_config.quantization`; ConfigError for a method that is unknown or not what the files say."""
    model = config.model_config
    stated = getattr(model.hf_config, "quantization_config", None)
    stated = stated if isinstance(stated, dict) else None
    found = stated.get("quant_method") if stated else None
    claimed = _claimed(stated, model)
    if claimed is not None:
        logger.info("the quantisation method %s takes a checkpoint that says %s", claimed, found)
        model.quantization = claimed
    elif found is not None and model.quantization not in (None, found):
        raise ConfigError(
            f"model_config.quantization is {model.quantization!r}, the checkpoint says {found!r}",
            code="config-quantization",
        )
    model.quantization = model.quantization or found
    if model.quantization is None:
        return
    known = registry("quantization_methods")
    if model.quantization not in known:
        raise ConfigError(
            f"quantization {model.quantization!r} is not supported{near_miss(model.quantization, known.names())}",
            code="config-quantization",
            fix=f"supported: {', '.join(known.names())}; a plugin can register others",
        )
    platform.verify_quantization(model.quantization)


def _claimed(stated: dict[str, Any] | None, model: ModelConfig) -> str | None:
    """The first of the plugins' methods that wants the checkpoint; what is built in claims none."""
    if stated is None:
        return None
    for entry in registry("quantization_methods").entries():
        if entry.built_in:
            continue
        name = entry.load().override_quantization_method(stated, model.quantization, hf_config=model.hf_config)
        if name is not None and name != stated.get("quant_method"):
            return str(name)
    return None
