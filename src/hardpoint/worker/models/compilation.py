"""Marks model classes that may be compiled; `compiling` reads the marks of a loaded model."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from hardpoint.config.sections import VllmConfig
from hardpoint.contracts.model import IntermediateTensors

ClassT = TypeVar("ClassT", bound=type)
Dims = dict[str, int | list[int]]

_TENSORS = (torch.Tensor, torch.Tensor | None, IntermediateTensors, IntermediateTensors | None)


def ignore_torch_compile(cls: ClassT) -> ClassT:
    """Class decorator: never compile this class, even if a base class may be."""
    cls._ignore_compile = True  # type: ignore[attr-defined]
    return cls


def support_torch_compile(
    cls: Any = None,
    *,
    dynamic_arg_dims: Dims | None = None,
    mark_unbacked_dims: Dims | None = None,
    enable_if: Callable[[VllmConfig], bool] | None = None,
    is_encoder: bool = False,
) -> Any:
    """Class decorator, bare or with arguments: the class may be compiled.

    dynamic_arg_dims  argument of `forward` -> dimensions whose size changes; unless given, the first
                      one of every argument annotated as a tensor (or None) or as IntermediateTensors
    enable_if         whether to compile under a configuration
    Raises TypeError for a class without `forward`, ValueError when no argument has such a dimension or
    a named argument does not exist.
    """

    def decorate(model_cls: ClassT) -> ClassT:
        if not callable(getattr(model_cls, "forward", None)):
            raise TypeError(f"{model_cls.__qualname__} has no forward method to compile")
        dims = dynamic_arg_dims or _inferred_dims(model_cls)
        known = inspect.signature(model_cls.forward).parameters  # type: ignore[attr-defined]
        unknown = sorted(set(dims) - set(known))
        if unknown:
            raise ValueError(f"{model_cls.__qualname__}.forward has no argument {', '.join(unknown)}")
        model_cls._compile_dynamic_arg_dims = dims  # type: ignore[attr-defined]
        model_cls._compile_enable_if = enable_if  # type: ignore[attr-defined]
        return model_cls

    return decorate if cls is None else decorate(cls)


def _inferred_dims(cls: type) -> Dims:
    forward: Any = cls.forward  # type: ignore[attr-defined]
    try:
        kinds = typing.get_type_hints(forward)
    except NameError:
        # An annotation that exists for type checkers only says nothing about tensors.
        kinds = getattr(forward, "__annotations__", {})
    found: Dims = {name: 0 for name, kind in kinds.items() if name != "return" and kind in _TENSORS}
    if not found:
        raise ValueError(
            f"no argument of {cls.__qualname__}.forward is annotated as a tensor: name them in dynamic_arg_dims"
        )
    return found
