"""Loads safetensors checkpoints: one file, several, or several with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm

from hardpoint.config.gguf_file import is_gguf
from hardpoint.config.model_files import fetch_weights
from hardpoint.config.sections import LoadConfig, ModelConfig
from hardpoint.config.weight_files import bad_file, weight_files
from hardpoint.contracts.model_loader import BaseModelLoader
from hardpoint.errors import ConfigError
from hardpoint.worker.loaders.checkpoint import Checkpoint, CheckpointTensor


class DefaultModelLoader(BaseModelLoader):
    """`auto`, `hf` and `safetensors`. Pickled weights are refused: reading them runs code."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        unknown = self.unused_options(set())
        if unknown:
            raise ConfigError(
                f"--model-loader-extra-config: load format {load_config.load_format!r} knows no {', '.join(unknown)}",
                code="config-load-options",
            )

    def download_model(self, model_config: ModelConfig) -> None:
        """Fetch the weights from the hub unless they are here."""
        fetch_weights(model_config, self.load_config)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fill the model from the checkpoint."""
        path = fetch_weights(model_config, self.load_config)
        if is_gguf(path):
            raise ConfigError(
                f"{path} is a GGUF file", code="config-load-format", fix="leave --load-format out, or give gguf"
            )
        files = weight_files(path)
        checkpoint = Checkpoint(str(path), self._tensors(files))
        checkpoint.fill(model, every_parameter=model_config.quantization is None)

    def _tensors(self, files: dict[Path, set[str] | None]) -> Iterator[CheckpointTensor]:
        seen: dict[str, Path] = {}
        shown = len(files) > 1 and self.load_config.use_tqdm_on_load
        for path, names in tqdm(files.items(), desc="Loading safetensors shards", disable=not shown):
            for name, tensor in _read(path, names):
                if name in seen:
                    raise bad_file(path, f"tensor {name!r} is in {seen[name].name} already")
                seen[name] = path
                yield CheckpointTensor(name, tensor, name, str(path))


def _read(path: Path, wanted: set[str] | None) -> Iterator[tuple[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            absent = sorted((wanted or set()) - set(names))
            if absent:
                raise bad_file(path, f"tensor {absent[0]!r} is not in it, although the index says so")
            for name in names:
                if wanted is None or name in wanted:
                    yield name, file.get_tensor(name)
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise bad_file(path, f"it is cut, damaged or not a safetensors file ({error})") from None
