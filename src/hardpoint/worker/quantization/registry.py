"""The quantisation methods by name, under vLLM's interface. Torch-free: plugins register in every process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hardpoint.errors import ConfigError
from hardpoint.extensions.refs import load_ref
from hardpoint.extensions.registry import registry
from hardpoint.log import init_logger

logger = init_logger(__name__)
ClassT = TypeVar("ClassT", bound=type)


class _Names(Sequence[str]):
    """The registered names, always as they are now."""

    def __getitem__(self, index: Any) -> Any:
        return registry("quantization_methods").names()[index]

    def __len__(self) -> int:
        return len(registry("quantization_methods").names())

    def __repr__(self) -> str:
        return repr(list(self))


QUANTIZATION_METHODS = _Names()


def register_quantization_config(quantization: str) -> Callable[[ClassT], ClassT]:
    """Class decorator: register a method; one of the same name is replaced.

    Raises ValueError for a class that does not derive from QuantizationConfig.
    """

    def decorate(cls: ClassT) -> ClassT:
        load_ref("hardpoint.contracts.quantization:QuantizationConfig")
        registry("quantization_methods").register(quantization, cls)
        supported = load_ref("hardpoint.platforms:current_platform").supported_quantization
        if supported and quantization not in supported:
            supported.append(quantization)
        return cls

    return decorate


def get_quantization_config(quantization: str) -> type[Any]:
    """The method registered under a name; ValueError when there is none."""
    methods = registry("quantization_methods")
    if quantization not in methods:
        raise ConfigError(
            f"Invalid quantization method: {quantization}",
            code="config-quantization",
            fix=f"known are {', '.join(methods.names())}",
        )
    return methods.load(quantization)
