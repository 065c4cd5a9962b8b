"""The suite for operations and layers that take the place of ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hardpoint.config.current import set_current_vllm_config
from hardpoint.config.sections import VllmConfig
from hardpoint.contracts.custom_op import CustomOp, PluggableLayer, op_registry_oot
from hardpoint.extensions.registry import isolated
from hardpoint.testing.failures import explained, require, require_class

_METHODS = ("forward_native", "forward_cuda", "forward_hip", "forward_cpu", "forward_tpu", "forward_xpu", "forward_oot")


def check_custom_op(
    cls: Any, replaces: Any, *args: Any, inputs: tuple[Any, ...] = (), close: float | None = 1e-5, **kwargs: Any
) -> None:
    """Register the operation in place of `replaces`, build it as a model does, and compute with it.

    args, kwargs  of the constructor           inputs  of one call
    close         how far results may differ from those of the operation it replaces; None: it computes something else
    """
    subject = _check_replacement(cls, replaces, CustomOp)
    overridden = [name for name in _METHODS if getattr(cls, name) is not getattr(replaces, name)]
    own_init = "__init__" in vars(cls)
    fix = f"override forward_native, forward_cpu or another of {', '.join(_METHODS)}"
    require(overridden or own_init or "forward" in vars(cls), subject, "it changes nothing of what it replaces", fix)
    _build_and_compare(cls, replaces, subject, args, kwargs, inputs, close)


def check_pluggable_layer(
    cls: Any, replaces: Any, *args: Any, inputs: tuple[Any, ...] = (), close: float | None = 1e-5, **kwargs: Any
) -> None:
    """The same for a layer that is replaced whole."""
    subject = _check_replacement(cls, replaces, PluggableLayer)
    _build_and_compare(cls, replaces, subject, args, kwargs, inputs, close)


def _check_replacement(cls: Any, replaces: Any, root: type) -> str:
    require_class(replaces, root)
    subject = require_class(cls)
    require(
        issubclass(cls, replaces) and cls is not replaces,
        subject,
        f"it does not derive from {replaces.__name__}, so a model that asks for that would never initialise it",
        f"derive it from {replaces.__name__}",
    )
    return subject


def _build_and_compare(
    cls: Any, replaces: Any, subject: str, args: Any, kwargs: Any, inputs: tuple[Any, ...], close: float | None
) -> None:
    fix = f"take the arguments of {replaces.__name__} and hand them on with super().__init__(...)"
    with isolated(), set_current_vllm_config(_all_ops_on()):
        op_registry_oot.pop(replaces.__name__, None)
        replaces.register_oot(cls)
        with explained(subject, f"building it where {replaces.__name__} is asked for", fix):
            theirs: nn.Module = replaces(*args, **kwargs)
        require(type(theirs) is cls, subject, f"asking for it builds {type(theirs).__name__}", "register it once")
        op_registry_oot.pop(replaces.__name__)
        ours: nn.Module = replaces(*args, **kwargs)
        built = subject, "the constructor leaves out what the original one does", fix
        require(set(theirs.state_dict()) >= set(ours.state_dict()), *built)
        _fill(ours)
        theirs.load_state_dict(ours.state_dict(), strict=False)
        if inputs:
            _compare(ours, theirs, subject, inputs, close)


def _fill(module: nn.Module) -> None:
    """Give parameters numbers: some are made to be loaded, and hold anything until then."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def _compare(ours: nn.Module, theirs: nn.Module, subject: str, inputs: tuple[Any, ...], close: float | None) -> None:
    with torch.no_grad(), explained(subject, "computing", "it is called like the operation it replaces"):
        expected, found = _flat(ours(*_fresh(inputs))), _flat(theirs(*_fresh(inputs)))
    shapes = [tuple(one.shape) for one in expected]
    require(
        [tuple(one.shape) for one in found] == shapes,
        subject,
        f"it gives shapes {[tuple(one.shape) for one in found]}, not {shapes}",
        "return what the original returns",
    )
    if close is None:
        return
    for one, other in zip(expected, found, strict=True):
        far = float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
        require(far <= close, subject, f"its results differ by {far:.3g} from the original's", "compute the same")


def _all_ops_on() -> VllmConfig:
    config = VllmConfig()
    config.compilation_config.__dict__["custom_ops"] = ["all"]
    return config


def _fresh(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    # An operation may write into what it is given.
    return tuple(one.clone() if isinstance(one, torch.Tensor) else one for one in inputs)


def _flat(result: Any) -> list[torch.Tensor]:
    return [one for one in (result if isinstance(result, tuple) else (result,)) if isinstance(one, torch.Tensor)]
