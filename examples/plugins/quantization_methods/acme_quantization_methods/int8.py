"""The method: settings of a checkpoint, and how one kind of layer keeps and uses its weights."""

from typing import Any

import torch
from torch import nn

from hardpoint.contracts.quantization import LinearMethodBase, QuantizationConfig, QuantizeMethodBase
from hardpoint.worker.layers.linear import LinearBase


class AcmeInt8Config(QuantizationConfig):
    """No settings: any checkpoint with plain weights can be rounded."""

    def get_name(self) -> str:
        """The name it is registered under."""
        return "acme_int8"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """What it computes with."""
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Any device."""
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        """No file beside the weights."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "AcmeInt8Config":
        """From the checkpoint's quantization_config; {} where it has none."""
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """For each layer of the model, by its kind and name; None leaves it alone."""
        return AcmeInt8Method() if isinstance(layer, LinearBase) else None


class AcmeInt8Method(LinearMethodBase):
    """A weight as int8 and one scale per output."""

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """A plain parameter to load into; it is rounded afterwards."""
        weight = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        attributes = {"input_dim": 1, "output_dim": 0, **extra_weight_attrs}
        for name, value in attributes.items():
            setattr(layer.weight, name, value)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Round once, and let the wide weight go."""
        layer.scale = layer.weight.float().abs().amax(dim=1) / 127
        rounded = (layer.weight.float() / layer.scale[:, None]).round()
        layer.weight = nn.Parameter(rounded.to(torch.int8), requires_grad=False)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., input] -> [..., output]."""
        output = nn.functional.linear(x, layer.weight.to(x.dtype)) * layer.scale.to(x.dtype)
        return output if bias is None else output + bias
