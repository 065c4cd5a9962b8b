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
from hardpoint.config.model_facts import read_json
from hardpoint.config.model_files import fetch_weights
from hardpoint.config.sections import LoadConfig, ModelConfig
from hardpoint.contracts.model_loader import BaseModelLoader
from hardpoint.errors import ConfigError, ModelFileError
from hardpoint.worker.loaders.checkpoint import Checkpoint, CheckpointTensor

INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth")


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
                    raise _bad(path, f"tensor {name!r} is in {seen[name].name} already")
                seen[name] = path
                yield CheckpointTensor(name, tensor, name, str(path))


def weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The files of a checkpoint, and of each the tensors to take (None = all).

    Raises ModelFileError when there are none, or when the index is not sound.
    """
    if not folder.is_dir():
        raise ModelFileError(f"{folder} is not a folder with safetensors files", code="model-file")
    index = folder / INDEX
    if index.is_file():
        return _indexed(folder, index)
    files = sorted(folder.glob("*.safetensors"))
    # Some repositories hold the same weights twice, split differently.
    main = [file for file in files if file.name.startswith("model")] or files
    if main:
        return dict.fromkeys(main)
    pickled = sorted(file.name for pattern in _PICKLED for file in folder.glob(pattern))
    what = f"only pickled weights ({pickled[0]}), which are not read because reading them runs code" if pickled else ""
    raise ModelFileError(
        f"{folder} has {what or 'no *.safetensors file'}",
        code="model-file",
        fix="convert them to safetensors" if pickled else "check the path, or fetch the model again",
    )


def _indexed(folder: Path, index: Path) -> dict[Path, set[str] | None]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _bad(index, "it has no weight_map")
    files: dict[Path, set[str] | None] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise _bad(index, f"it places tensor {name!r} in {file_name!r}, which is not a file name")
        names = files.setdefault(folder / file_name, set())
        assert names is not None
        names.add(name)
    missing = sorted(path.name for path in files if not path.is_file())
    if missing:
        raise _bad(index, f"it names files that are not there: {', '.join(missing[:5])}")
    return files


def _read(path: Path, wanted: set[str] | None) -> Iterator[tuple[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            absent = sorted((wanted or set()) - set(names))
            if absent:
                raise _bad(path, f"tensor {absent[0]!r} is not in it, although the index says so")
            for name in names:
                if wanted is None or name in wanted:
                    yield name, file.get_tensor(name)
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise _bad(path, f"it is cut, damaged or not a safetensors file ({error})") from None


def _bad(path: Path, reason: str) -> ModelFileError:
    return ModelFileError(f"{path}: {reason}", code="model-file", fix="fetch the model again")
