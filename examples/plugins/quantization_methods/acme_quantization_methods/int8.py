"""The method: settings of a checkpoint, and how one kind of layer keeps and uses its weights."""

from typing import Any

import torch
from torch import nn

from hardpoint.contracts.quantization import LinearMethodBase, QuantizationConfig, QuantizeMethodBase
from hardpoint.worker.layers.linear import LinearBase, UnquantizedLinearMethod


class AcmeInt8Config(QuantizationConfig):
    """Any checkpoint with plain weights can be rounded; one that is rounded already says so in its config.json.

        "quantization_config": {"quant_method": "acme_int8", "ignore": ["lm_head"]}

    stored  whether the files hold int8 weights, each with a `weight_scale` [outputs]
    ignore  parts of the names of layers that are left as they are
    """

    def __init__(self, stored: bool = False, ignore: list[str] | None = None) -> None:
        super().__init__()
        self.stored = stored
        self.ignore = ignore or []

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
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any] | None, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take checkpoints of another tool that have the same form under another name."""
        return "acme_int8" if (hf_quant_cfg or {}).get("quant_method") == "other_tool_int8" else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "AcmeInt8Config":
        """From the checkpoint's quantization_config; {} where it has none."""
        return cls(stored=bool(config), ignore=config.get("ignore"))

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """For each layer of the model, by its kind and name; None leaves it alone, which a linear layer cannot be."""
        if not isinstance(layer, LinearBase):
            return None
        if any(part in prefix for part in self.ignore):
            return UnquantizedLinearMethod()
        return AcmeInt8Method(self.stored)


class AcmeInt8Method(LinearMethodBase):
    """A weight as int8 and one scale per output."""

    def __init__(self, stored: bool) -> None:
        self.stored = stored

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
        """Parameters to load into. A plain weight is rounded afterwards."""
        outputs = sum(output_partition_sizes)
        kind = torch.int8 if self.stored else params_dtype
        parameters = {"weight": torch.empty(outputs, input_size_per_partition, dtype=kind)}
        if self.stored:
            parameters["weight_scale"] = torch.empty(outputs, dtype=torch.float32)
        for name, tensor in parameters.items():
            parameter = nn.Parameter(tensor, requires_grad=False)
            dims = {"output_dim": 0} if name == "weight_scale" else {"input_dim": 1, "output_dim": 0}
            for attribute, value in {**dims, **extra_weight_attrs}.items():
                setattr(parameter, attribute, value)
            layer.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Round once, and let the wide weight go."""
        if self.stored:
            return
        scale = layer.weight.float().abs().amax(dim=1) / 127
        rounded = (layer.weight.float() / scale.clamp(min=1e-30)[:, None]).round()
        layer.weight = nn.Parameter(rounded.to(torch.int8), requires_grad=False)
        layer.weight_scale = nn.Parameter(scale, requires_grad=False)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., input] -> [..., output]."""
        output = nn.functional.linear(x, layer.weight.to(x.dtype)) * layer.weight_scale.to(x.dtype)
        return output if bias is None else output + bias

    def dequantize_weight(self, layer: nn.Module) -> torch.Tensor:
        """[output, input] as plain numbers."""
        return layer.weight.float() * layer.weight_scale[:, None]
