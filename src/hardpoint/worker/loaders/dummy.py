"""Loads nothing: fills the model with small random numbers, the same at every start."""

from __future__ import annotations

import torch
from torch import nn

from hardpoint.config.sections import ModelConfig
from hardpoint.contracts.model_loader import BaseModelLoader

_SEED = 1234
_BOUND = 1e-3


class DummyModelLoader(BaseModelLoader):
    """`dummy`: for trying a configuration out without its weights."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing to fetch."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fill every floating-point tensor, each from a generator of its own."""
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                generator = torch.Generator(device="cpu").manual_seed(_SEED)
                numbers = torch.empty(tensor.shape, dtype=torch.float32).uniform_(-_BOUND, _BOUND, generator=generator)
                tensor.copy_(numbers)
