"""The suite for quantisation methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hardpoint.config.current import set_current_vllm_config
from hardpoint.config.sections import VllmConfig
from hardpoint.contracts.quantization import QuantizationConfig, QuantizeMethodBase
from hardpoint.testing.failures import explained, require, require_class
from hardpoint.worker.layers.linear import ReplicatedLinear

_INPUTS, _OUTPUTS = 64, 32
Fill = Callable[[nn.Module, torch.Tensor], None]


def check_quantization_config(
    cls: Any, config: dict[str, Any] | None = None, fill: Fill | None = None, close: float = 0.1
) -> None:
    """Read the settings, build a linear layer, load it and compute.

    config  what `from_config` gets: the checkpoint's `quantization_config`; {} unless given
    fill    loads a weight [outputs, inputs] into a layer in the method's own form; the parameter `weight` is
            filled unless given
    close   how far results may differ from those of the unquantised weight, as a share of their size
    """
    subject = require_class(cls, QuantizationConfig)
    _check_facts(cls, subject)
    with explained(subject, "from_config", "it gets the checkpoint's quantization_config as a dict"):
        settings = cls.from_config(dict(config or {}))
    require(isinstance(settings, QuantizationConfig), subject, f"from_config gives {settings!r}", "return an instance")
    _check_instance(settings, subject)
    _check_layer(settings, subject, fill or _fill_weight, close)


def _check_facts(cls: Any, subject: str) -> None:
    with explained(subject, "get_min_capability and get_config_filenames", "they are class or static methods"):
        capability, files = cls.get_min_capability(), cls.get_config_filenames()
    require(isinstance(capability, int), subject, f"get_min_capability gives {capability!r}", "return an int; -1 = any")
    named = isinstance(files, list) and all(isinstance(name, str) for name in files)
    require(named, subject, f"get_config_filenames gives {files!r}", "return a list of file names, maybe empty")


def _check_instance(settings: Any, subject: str) -> None:
    name, dtypes = settings.get_name(), settings.get_supported_act_dtypes()
    require(
        isinstance(name, str) and name, subject, f"get_name gives {name!r}", "return the name it is registered under"
    )
    known = isinstance(dtypes, list) and dtypes and all(isinstance(one, torch.dtype) for one in dtypes)
    require(known, subject, f"get_supported_act_dtypes gives {dtypes!r}", "return a list of torch dtypes")
    mapping = getattr(settings, "packed_modules_mapping", None)
    require(isinstance(mapping, dict), subject, "it has no packed_modules_mapping", "call super().__init__()")


def _check_layer(settings: Any, subject: str, fill: Fill, close: float) -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(_OUTPUTS, _INPUTS, generator=generator) / _INPUTS**0.5
    x = torch.randn(3, _INPUTS, generator=generator)
    fix = "see QuantizeMethodBase for who calls what"
    with set_current_vllm_config(VllmConfig()), torch.no_grad():
        with explained(subject, "building a linear layer", fix):
            layer = ReplicatedLinear(
                _INPUTS, _OUTPUTS, bias=False, params_dtype=torch.float32, quant_config=settings, prefix="layer"
            )
        method = layer.quant_method
        found = isinstance(method, QuantizeMethodBase)
        require(found, subject, f"get_quant_method gives {method!r} for a linear layer", "return a method for it")
        with explained(subject, "loading the layer", "give each parameter a weight_loader, or pass `fill`"):
            fill(layer, weight)
        with explained(subject, "process_weights_after_loading", fix):
            method.process_weights_after_loading(layer)
        with explained(subject, "apply", fix):
            result = layer(x)[0]
    expected = x @ weight.T
    shape = tuple(getattr(result, "shape", ()))
    require(shape == (3, _OUTPUTS), subject, f"apply gives {shape}", f"return [..., outputs], here {(3, _OUTPUTS)}")
    far = float((result.float() - expected).norm() / expected.norm())
    what = f"its results differ by {far:.3g} of their size from the unquantised ones, more than {close}"
    require(far <= close, subject, what, "check scales and order, or pass `close` if that is how coarse the method is")


def _fill_weight(layer: nn.Module, weight: torch.Tensor) -> None:
    parameter = layer.weight
    loader = getattr(parameter, "weight_loader", None)
    if loader is None:
        parameter.copy_(weight)  # type: ignore[operator]
    else:
        loader(parameter, weight)
