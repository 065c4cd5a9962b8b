"""GGUF's quantisation: weights are dequantised once, while they are loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hardpoint.contracts.quantization import QuantizationConfig, QuantizeMethodBase
from hardpoint.worker.layers.linear import LinearBase, UnquantizedLinearMethod


class GGUFConfig(QuantizationConfig):
    """A GGUF file. Each of its tensors says itself how it is stored, so there are no settings."""

    def get_name(self) -> str:
        """gguf."""
        return "gguf"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Float types."""
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Any device."""
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> GGUFConfig:
        """The same for every file."""
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Plain weights: what is loaded into them is dequantised on the way."""
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
