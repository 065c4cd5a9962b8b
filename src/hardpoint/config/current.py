"""The configuration that model code sees while it is built, as in vLLM.

Only for code that runs under another's constructor (layers, plugins). Everything of ours is handed
the section it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from hardpoint.config.sections import VllmConfig

_current: ContextVar[VllmConfig | None] = ContextVar("hardpoint_vllm_config", default=None)
_prefix: ContextVar[str | None] = ContextVar("hardpoint_vllm_config_prefix", default=None)


@contextmanager
def set_current_vllm_config(
    vllm_config: VllmConfig, check_compile: bool = False, prefix: str | None = None
) -> Iterator[None]:
    """Make `vllm_config` the current one inside the block; blocks nest.

    check_compile  accepted for vLLM's callers; compiled models are checked where they are compiled
    prefix         module path of what is being built
    """
    token, prefix_token = _current.set(vllm_config), _prefix.set(prefix)
    try:
        yield
    finally:
        _current.reset(token)
        _prefix.reset(prefix_token)


def get_current_vllm_config_or_none() -> VllmConfig | None:
    """Return the current configuration, or None outside a block."""
    return _current.get()


def get_current_vllm_config() -> VllmConfig:
    """Return the current configuration; an AssertionError outside a block, as in vLLM."""
    config = _current.get()
    if config is None:
        raise AssertionError(
            "there is no current vLLM config: build layers inside `with set_current_vllm_config(config):`"
        )
    return config


def get_current_model_prefix() -> str:
    """Return the module path of what is being built."""
    prefix = _prefix.get()
    if prefix is None:
        raise AssertionError("there is no current model prefix")
    return prefix


def get_layers_from_vllm_config(
    vllm_config: VllmConfig, layer_type: type[Any], layer_names: list[str] | None = None
) -> dict[str, Any]:
    """Return the layers of one kind that the model registered, by name."""
    known = vllm_config.compilation_config.static_forward_context
    names = known if layer_names is None else layer_names
    return {name: known[name] for name in names if isinstance(known[name], layer_type)}
