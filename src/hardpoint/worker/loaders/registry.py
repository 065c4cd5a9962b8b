"""The model loaders by load format, under vLLM's interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hardpoint.config.sections import LoadConfig
from hardpoint.contracts.model_loader import BaseModelLoader
from hardpoint.errors import ConfigError
from hardpoint.extensions.registry import registry
from hardpoint.log import init_logger

logger = init_logger(__name__)
ClassT = TypeVar("ClassT", bound=type)


def register_model_loader(load_format: str) -> Callable[[ClassT], ClassT]:
    """Class decorator: register a loader; one for the same format is replaced, with a WARNING.

    Raises ValueError for a class that does not derive from BaseModelLoader.
    """

    def decorate(cls: ClassT) -> ClassT:
        registry("model_loaders").register(load_format, cls)
        logger.info("Registered model loader %s.%s with load format %r", cls.__module__, cls.__qualname__, load_format)
        return cls

    return decorate


def get_model_loader(load_config: LoadConfig) -> BaseModelLoader:
    """The loader for a load format; ValueError when there is none."""
    loaders = registry("model_loaders")
    if load_config.load_format not in loaders:
        raise ConfigError(
            f"Load format `{load_config.load_format}` is not supported",
            code="config-load-format",
            fix=f"known are {', '.join(loaders.names())}",
        )
    loader = loaders.load(load_config.load_format)(load_config)
    loaders.note_use(load_config.load_format, "loads the model")
    return loader
