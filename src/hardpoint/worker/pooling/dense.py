"""Projections that a sentence-transformers folder puts behind the pooling."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from hardpoint.config.model_facts import read_json
from hardpoint.config.sections import ModelConfig
from hardpoint.config.sentence_transformers import read_sentence_model
from hardpoint.errors import ModelFileError

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "torch.nn.modules.linear.Identity": nn.Identity,
    "torch.nn.modules.activation.Tanh": nn.Tanh,
    "torch.nn.modules.activation.ReLU": nn.ReLU,
    "torch.nn.modules.activation.GELU": nn.GELU,
}


def sentence_projector(model_config: ModelConfig) -> nn.Module | None:
    """The Dense modules of a model's folder with their weights, in float32; None where it has none."""
    place = Path(model_config.local_path) if model_config.local_path else None
    found = read_sentence_model(place) if place is not None else None
    if found is None or place is None or not found.dense:
        return None
    return nn.Sequential(*(part for name in found.dense for part in _dense(place / name)))


def _dense(folder: Path) -> list[nn.Module]:
    config = read_json(folder / "config.json")
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if activation not in _ACTIVATIONS:
        raise ModelFileError(f"{folder}: the activation {activation!r} is not known", code="model-pooling")
    file = folder / "model.safetensors"
    try:
        weights = load_file(file)
        linear = nn.Linear(
            config["in_features"], config["out_features"], bias=config.get("bias", True), dtype=torch.float32
        )
        linear.load_state_dict({name.removeprefix("linear."): tensor.float() for name, tensor in weights.items()})
    except (OSError, SafetensorError, KeyError, RuntimeError, TypeError) as error:
        raise ModelFileError(f"{file} is not the projection it should be: {error}", code="model-pooling") from None
    return [linear, _ACTIVATIONS[activation]()]
