"""What a plugin may say about models while the configuration is made: classes for config.json files, and checks.

Both tables are plain dicts that plugins write into, under vLLM's names.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from hardpoint.config.sections import ModelConfig, VllmConfig
from hardpoint.errors import ConfigError, HardpointError, ModelFileError
from hardpoint.extensions.faults import in_words
from hardpoint.log import init_logger

logger = init_logger(__name__)

# model_type -> a class like transformers' PretrainedConfig, which states what a config.json leaves unsaid.
CONFIG_REGISTRY: dict[str, Any] = {}


class VerifyAndUpdateConfig:
    """Checks and changes the configuration for one architecture; both methods do nothing unless overridden.

    Called  once in every process that settles the configuration, after the model's class is chosen.
    Fault   what it raises refuses the configuration.
    """

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Change the configuration, or raise to refuse it."""

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        """Change the model section, or raise to refuse it."""


# architecture -> its hook
MODELS_CONFIG_MAP: dict[str, type[VerifyAndUpdateConfig]] = {}


def ask_model_hook(config: VllmConfig, platform: Any) -> None:
    """Call the hook that a plugin has for the model. Raises `ConfigError` with what it raises."""
    architecture = config.model_config.architecture
    hook = MODELS_CONFIG_MAP.get(architecture)
    if hook is None:
        return
    try:
        hook.verify_and_update_model_config(config.model_config)
        hook.verify_and_update_config(config)
    except HardpointError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the hook of {architecture} refuses the configuration: {in_words(error)}",
            code="config-model-hook",
            origin=f"{hook.__module__}.{hook.__qualname__}",
        ) from error


def as_registered(values: dict[str, Any]) -> dict[str, Any]:
    """The contents of a config.json as the class a plugin registered for its model type completes them."""
    kind = values.get("model_type")
    cls = (CONFIG_REGISTRY.get(kind) or _known_to_transformers(kind)) if isinstance(kind, str) else None
    if cls is None:
        return values
    try:
        stated = json.loads(json.dumps(cls(**values).to_dict(), default=str))
    except Exception as error:
        raise ModelFileError(
            f"{cls.__module__}.{cls.__qualname__} cannot read the model's config: {in_words(error)}",
            code="model-facts",
            origin=cls.__module__,
        ) from error
    logger.debug("the model's config is completed by %s.%s", cls.__module__, cls.__qualname__)
    return {**values, **{key: value for key, value in stated.items() if value is not None or key not in values}}


def _known_to_transformers(kind: str) -> Any:
    """The class a plugin registered with transformers itself (`AutoConfig.register`), if it has imported that."""
    module = sys.modules.get("transformers.models.auto.configuration_auto")
    registered = getattr(getattr(module, "CONFIG_MAPPING", None), "_extra_content", None)
    return registered.get(kind) if isinstance(registered, dict) else None
