"""The loader: finds the checkpoint and fills the model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hardpoint.contracts.model_loader import BaseModelLoader
from hardpoint.errors import ModelFileError


class AcmeNpzLoader(BaseModelLoader):
    """A folder with `weights.npz` (or the file that --model-loader-extra-config names)."""

    def download_model(self, model_config: Any) -> None:
        """Nothing to fetch: the folder must be here."""
        self._file(model_config)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Hand every tensor to the model, and see that nothing is left without numbers."""
        loaded = model.load_weights(self._tensors(self._file(model_config)))
        missing = set(dict(model.named_parameters())) - set(loaded or ())
        if loaded is not None and missing:
            raise ModelFileError(f"the checkpoint lacks {', '.join(sorted(missing)[:5])}", code="model-file")

    def _file(self, model_config: Any) -> Path:
        options = self.load_config.model_loader_extra_config or {}
        path = Path(model_config.local_path or model_config.model) / options.get("file", "weights.npz")
        if not path.is_file():
            raise ModelFileError(f"{path} does not exist", code="model-file", fix="save the weights with numpy.savez")
        return path

    def _tensors(self, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
        with np.load(path, allow_pickle=False) as arrays:
            for name in arrays.files:
                yield name, torch.from_numpy(arrays[name])
