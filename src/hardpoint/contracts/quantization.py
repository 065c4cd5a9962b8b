"""What a quantisation method implements: a configuration, and a method per kind of layer.

Built   the configuration once, in the worker, from the checkpoint; a method per layer, as the model is built.
Called  `create_weights` at construction, `process_weights_after_loading` once, `apply` every step.
Fault   what these raise stops the load, or ends the step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable


class QuantizeMethodBase(ABC):
    """How one layer keeps its weights and computes with them."""

    requires_device_loading: bool = True
    uses_meta_device: bool = False
    supports_pre_processed_weights: bool = False

    @abstractmethod
    def create_weights(self, layer: nn.Module, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        """Give `layer` its parameters, with the loading attributes of `extra_weight_attrs` set on each."""

    @abstractmethod
    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the layer."""

    def embedding(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Look rows up; only for methods that serve embeddings."""
        raise NotImplementedError(f"{type(self).__name__} cannot look up embeddings")

    def process_weights_after_loading(self, layer: nn.Module) -> None:  # noqa: B027 - optional
        """Bring the loaded weights into the form `apply` wants."""

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        """Make `layer` use the weights of `embed_tokens`; returns the layer to use from now on."""
        layer.weight = embed_tokens.weight
        return layer

    def dequantize_weight(self, layer: nn.Module) -> torch.Tensor:
        """[output, input] the layer's weight as plain numbers."""
        raise NotImplementedError(f"{type(self).__name__} cannot restore its weights")


class LinearMethodBase(QuantizeMethodBase):
    """How a linear layer keeps its weights and computes with them."""

    @abstractmethod
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
        """Give `layer` its parameters.

        input_size_per_partition  inputs on this rank       input_size   inputs in all
        output_partition_sizes    outputs on this rank of each fused part   output_size  outputs in all
        extra_weight_attrs        e.g. weight_loader; to be set on each parameter
        """

    @abstractmethod
    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., input] -> [..., output]."""


class QuantizationConfig(ABC):
    """A quantisation method with the settings of one checkpoint."""

    def __init__(self) -> None:
        # Fused layer -> the names its parts have in the checkpoint; taken from the model class.
        self.packed_modules_mapping: dict[str, list[str]] = {}

    @abstractmethod
    def get_name(self) -> str:
        """The name it is registered under."""

    @abstractmethod
    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Activation types it can compute with."""

    @classmethod
    @abstractmethod
    def get_min_capability(cls) -> int:
        """The oldest device it runs on, e.g. 80; -1 = any."""

    @staticmethod
    @abstractmethod
    def get_config_filenames() -> list[str]:
        """Files beside the weights that may hold its settings."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        """Read the settings of a checkpoint."""

    @abstractmethod
    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method for a layer; None leaves it unquantised (an error for a linear layer)."""

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any] | None, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Claim a checkpoint that says it is quantised otherwise: return the own name, or None."""
        return None

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:  # noqa: B027 - optional
        """Rename the layers the settings speak of, from checkpoint names to the model's."""

    def maybe_update_config(  # noqa: B027 - optional
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Complete the settings from the checkpoint's files."""

    def get_cache_scale_mapper(self) -> Any:
        """A mapper from the checkpoint's KV scales to the model's names; None = there are none."""
        return None

    def get_checkpoint_weight_mapper(self) -> Any:
        """A mapper from the checkpoint's weights to the model's names; None = they agree."""
        return None

    @staticmethod
    def get_from_keys(config: dict[str, Any], keys: Iterable[str]) -> Any:
        """The value of the first key that is present; ValueError when none is."""
        names = list(keys)
        for key in names:
            if key in config:
                return config[key]
        raise ValueError(f"the quantisation settings have none of {names}")

    @staticmethod
    def get_from_keys_or(config: dict[str, Any], keys: Iterable[str], default: Any) -> Any:
        """The value of the first key that is present, else `default`."""
        return next((config[key] for key in keys if key in config), default)
