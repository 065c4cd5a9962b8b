"""The safetensors files of a checkpoint: which there are, and whether each can be one; nothing is loaded."""

from __future__ import annotations

from pathlib import Path

from hardpoint.config.gguf_file import is_gguf
from hardpoint.config.model_facts import read_json
from hardpoint.config.sections import VllmConfig
from hardpoint.errors import ConfigError, ModelFileError
from hardpoint.extensions.registry import registry

INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth")
# The length of the header, and an empty header.
_LEAST_BYTES = 10


def check_weights(config: VllmConfig) -> None:
    """Find a local checkpoint whose files are not there before a process is kept busy with it.

    Raises ModelFileError, and ConfigError for options that no loader of ours has. What is still to be fetched, or is
    for a plugin's loader to read, is left to that.
    """
    place, load = Path(config.model_config.model).expanduser(), config.load_config
    loader = registry("model_loaders").entry(load.load_format)
    if loader.built_in and load.model_loader_extra_config:
        raise ConfigError(
            f"load_config.model_loader_extra_config: load format {load.load_format!r} knows no "
            f"{', '.join(map(str, load.model_loader_extra_config))}",
            code="config-load-options",
            origin="--model-loader-extra-config",
            fix="leave it out, or choose a plugin's --load-format",
        )
    reads_them = loader.built_in and loader.name in ("auto", "hf", "safetensors")
    if reads_them and place.is_dir() and not is_gguf(place):
        weight_files(place)


def weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The files of a checkpoint, and of each the tensors to take (None = all).

    Raises ModelFileError when there are none, or when the index or a file cannot be sound.
    """
    if not folder.is_dir():
        raise ModelFileError(f"{folder} is not a folder with safetensors files", code="model-file")
    index = folder / INDEX
    files = _indexed(folder, index) if index.is_file() else _listed(folder)
    for path in files:
        _check(path)
    return files


def _listed(folder: Path) -> dict[Path, set[str] | None]:
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
        raise bad_file(index, "it has no weight_map")
    files: dict[Path, set[str] | None] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise bad_file(index, f"it places tensor {name!r} in {file_name!r}, which is not a file name")
        names = files.setdefault(folder / file_name, set())
        assert names is not None
        names.add(name)
    missing = sorted(path.name for path in files if not path.exists() and not path.is_symlink())
    if missing:
        raise bad_file(index, f"it names files that are not there: {', '.join(missing[:5])}")
    return files


def _check(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise bad_file(path, f"it is a link to {path.readlink()}, which does not exist")
    if not path.is_file():
        raise bad_file(path, "it is not a file")
    try:
        with path.open("rb"):
            size = path.stat().st_size
    except OSError as problem:
        raise bad_file(path, f"it cannot be read: {problem.strerror}") from None
    if size < _LEAST_BYTES:
        raise bad_file(path, f"it is cut, damaged or not a safetensors file ({size} bytes)")


def bad_file(path: Path, reason: str) -> ModelFileError:
    """The error for a file of a checkpoint that cannot be used."""
    return ModelFileError(f"{path}: {reason}", code="model-file", fix="fetch the model again")
