"""What a sentence-transformers folder says about pooling: modules.json and the files it names."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardpoint.errors import ModelFileError

_MAX_BYTES = 1 << 20
# Keys of a pooling module's config -> our pooling types; other modes are refused by name.
_MODES = {
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_mean_tokens": "MEAN",
    "pooling_mode_lasttoken": "LAST",
}
_PLAIN_MODES = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}


@dataclass(frozen=True, slots=True)
class SentenceModel:
    """How a folder turns hidden states into an embedding.

    pooling         CLS, MEAN or LAST; empty where no module pools
    normalize       whether embeddings have length one
    dense           folders of projections, in order
    max_seq_length  tokens it was made for; None where it does not say
    """

    pooling: str
    normalize: bool
    dense: tuple[str, ...] = ()
    max_seq_length: int | None = None


def read_sentence_model(folder: Path) -> SentenceModel | None:
    """Read a model folder; None where it is not from sentence-transformers.

    Raises `ModelFileError` for files that are damaged, and for modules that are not supported.
    """
    listed = folder / "modules.json"
    if not folder.is_dir() or not listed.is_file():
        return None
    modules = _read(listed)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelFileError(f"{listed} holds no list of modules", code="model-pooling")
    pooling, normalize, dense = "", False, []
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(_inside(folder, module))
        elif kind == "Normalize":
            normalize = True
        elif kind == "Dense":
            dense.append(str(_inside(folder, module).relative_to(folder.resolve())))
        elif kind != "Transformer":
            raise ModelFileError(f"{listed}: modules of type {module.get('type')!r} are not supported",
                                 code="model-pooling")  # fmt: skip
    return SentenceModel(pooling, normalize, tuple(dense), _length(folder))


def _inside(folder: Path, module: dict[str, Any]) -> Path:
    """The folder of a module, which must be within the model's."""
    place = (folder / str(module.get("path", ""))).resolve()
    if not place.is_relative_to(folder.resolve()):
        raise ModelFileError(f"{folder / 'modules.json'}: the path {module.get('path')!r} leads out of the model",
                             code="model-pooling")  # fmt: skip
    return place


def _pooling(folder: Path) -> str:
    config = _read(folder / "config.json")
    if not isinstance(config, dict):
        raise ModelFileError(f"{folder / 'config.json'} holds no object", code="model-pooling")
    mode = config.get("pooling_mode")
    if isinstance(mode, str):
        asked = [mode]
        found = _PLAIN_MODES.get(mode)
    else:
        asked = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
        found = _MODES.get(asked[0]) if len(asked) == 1 else None
    if found is None:
        raise ModelFileError(
            f"{folder / 'config.json'}: the pooling {' with '.join(asked) or 'by nothing'} is not supported",
            code="model-pooling",
            fix='choose one with --pooler-config, such as \'{"pooling_type": "MEAN"}\'',
        )
    return found


def _length(folder: Path) -> int | None:
    file = folder / "sentence_bert_config.json"
    config = _read(file) if file.is_file() else {}
    length = config.get("max_seq_length") if isinstance(config, dict) else None
    return length if isinstance(length, int) and length > 0 else None


def _read(file: Path) -> Any:
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ModelFileError(f"{file} is larger than {_MAX_BYTES >> 20} MiB", code="model-json")
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ModelFileError(f"{file} cannot be read: {problem.strerror}", code="model-json") from None
    except (ValueError, RecursionError) as problem:
        raise ModelFileError(f"{file} is not JSON: {problem}", code="model-json") from None
