"""What a model loader implements: it finds a checkpoint and fills a model from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from torch import nn

from hardpoint.extensions.refs import load_ref

if TYPE_CHECKING:
    from hardpoint.config.sections import LoadConfig, ModelConfig, VllmConfig


class BaseModelLoader(ABC):
    """One `--load-format`.

    Built   once per model, in the worker, with the load section; the user's
            `--model-loader-extra-config` is `load_config.model_loader_extra_config`.
    Called  `load_model`, which builds the model and has it filled by `load_weights`.
    Fault   raise ModelFileError naming the file and the tensor: the worker does not start.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config

    @abstractmethod
    def download_model(self, model_config: ModelConfig) -> None:
        """Make the checkpoint present on this machine, without reading it."""

    @abstractmethod
    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fill every parameter of `model`."""

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        """Build the model, fill it, and let its layers prepare."""
        load = load_ref("hardpoint.worker.loaders.building:load_with")
        return load(self, vllm_config, model_config, prefix)

    def create_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        """Build the model with uninitialised parameters."""
        create = load_ref("hardpoint.worker.loaders.building:create_model")
        return create(vllm_config, model_config, prefix)

    def get_external_weight_memory(self, vllm_config: VllmConfig) -> int:
        """Bytes of weights that live outside the worker's own memory."""
        return 0

    def unused_options(self, known: set[str]) -> list[str]:
        """Keys of `--model-loader-extra-config` this loader does not know."""
        extra: dict[str, Any] = self.load_config.model_loader_extra_config or {}
        return sorted(set(extra) - known)
