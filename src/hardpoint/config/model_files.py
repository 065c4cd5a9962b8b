"""Where a model's files are: a path, a model of the catalogue, or a Hugging Face repository.

`locate` fetches what the configuration and the tokenizer need; `fetch_weights` fetches the rest.
Both give a folder or a .gguf file on this machine.
"""

from __future__ import annotations

import fnmatch
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardpoint.config import catalogue
from hardpoint.config.gguf_file import is_gguf, part_names
from hardpoint.config.sections import LoadConfig, ModelConfig, near_miss
from hardpoint.errors import ModelFileError
from hardpoint.extensions.refs import load_ref
from hardpoint.log import init_logger

logger = init_logger(__name__)

SMALL_FILES = ["*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]
WEIGHT_FILES = ["*.safetensors", "*.safetensors.index.json"]
# Folders of a repository that hold the same model in another form.
OTHER_EXPORTS = ["onnx/*", "openvino/*", "coreml/*"]
# What names a file and no repository.
_FILE_ENDS = (".gguf", ".safetensors", ".json", ".bin", ".pt", ".pth")
_REPO = re.compile(r"^[\w][\w.-]*(/[\w][\w.-]*)?$")
_REPO_FILE = re.compile(r"^(?P<repo>[\w][\w.-]*/[\w][\w.-]*)/(?P<file>.+\.gguf)$", re.IGNORECASE)
_REPO_QUANT = re.compile(r"^(?P<repo>[\w][\w.-]*/[\w][\w.-]*):(?P<quant>[A-Za-z0-9_]+)$")


@dataclass(frozen=True, slots=True)
class Hub:
    """How to reach Hugging Face: which revision, with which token, into which folder."""

    revision: str | None = None
    token: bool | str | None = None
    folder: str | None = None
    ignore: tuple[str, ...] = ()


def hub_of(model_config: ModelConfig, load_config: LoadConfig, revision: str | None = None) -> Hub:
    """Collect the settings that concern the hub; `revision` stands in for the model's."""
    ignore = load_config.ignore_patterns
    return Hub(
        revision=revision or model_config.revision,
        token=model_config.hf_token,
        folder=load_config.download_dir,
        ignore=(ignore,) if isinstance(ignore, str) else tuple(ignore),
    )


def locate(name: str, hub: Hub) -> Path:
    """Return the folder or .gguf file that `name` means, with its small files on this machine.

    Tried in order: an existing path, the catalogue, `owner/repo/file.gguf`, `owner/repo:QUANT`, `owner/repo`.
    Raises `ModelFileError` naming what was tried.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if path.is_symlink():
        raise _nowhere(name, f"it is a link to {path.readlink()}, which does not exist")
    entry = catalogue.find(name)
    if entry is not None:
        return catalogue.pull(entry, logger.info)
    return _from_hub(name, hub, SMALL_FILES)


def has_revisions(name: str) -> bool:
    """Whether `name` is a repository rather than something on this machine or of the catalogue."""
    return not Path(name).expanduser().exists() and catalogue.find(name) is None


def fetch_weights(model_config: ModelConfig, load_config: LoadConfig) -> Path:
    """Return the folder or .gguf file with the weights; fetches them from the hub where that is needed.

    For model loaders, in worker processes. Raises `ModelFileError`.
    """
    path = Path(model_config.model).expanduser()
    if path.exists():
        return path
    local = Path(model_config.local_path)
    if local.is_file() or catalogue.find(model_config.model) is not None:
        return local
    hub = hub_of(model_config, load_config)
    return _from_hub(model_config.model, hub, [*SMALL_FILES, *WEIGHT_FILES])


def _from_hub(name: str, hub: Hub, patterns: list[str]) -> Path:
    one = _REPO_FILE.match(name)
    if one is not None:
        return _fetch_file(name, one["repo"], one["file"], hub)
    if name.lower().endswith(_FILE_ENDS):
        raise _nowhere(name, "there is no such file or folder")
    quant = _REPO_QUANT.match(name)
    if quant is not None:
        return _fetch_file(name, quant["repo"], _file_of_quant(name, quant["repo"], quant["quant"], hub), hub)
    if not _REPO.match(name):
        raise _nowhere(name, "there is no such file or folder")
    ignore = [*hub.ignore, *OTHER_EXPORTS]
    return Path(_ask_hub(name, "snapshot_download", hub, repo_id=name, allow_patterns=patterns, ignore_patterns=ignore))


def _fetch_file(name: str, repo: str, file: str, hub: Hub) -> Path:
    """Fetch one .gguf file, with all parts if it is split; the first one's place."""
    places = [_ask_hub(name, "hf_hub_download", hub, repo_id=repo, filename=part) for part in part_names(file)]
    return Path(places[0])


def _file_of_quant(name: str, repo: str, quant: str, hub: Hub) -> str:
    files = _ask_hub(name, "list_repo_files", Hub(revision=hub.revision, token=hub.token), repo_id=repo)
    found = [file for file in sorted(files) if fnmatch.fnmatch(file.lower(), f"*{quant.lower()}*.gguf")]
    if not found:
        kinds = ", ".join(file for file in sorted(files) if file.endswith(".gguf")) or "none"
        raise _nowhere(name, f"the repository has no .gguf file of the kind {quant}; it has: {kinds}")
    return found[0]


def _ask_hub(name: str, function: str, hub: Hub, **arguments: Any) -> Any:
    if hub.folder is not None and function != "list_repo_files":
        arguments["cache_dir"] = hub.folder
    try:
        return load_ref(f"huggingface_hub:{function}")(revision=hub.revision, token=hub.token, **arguments)
    except Exception as problem:
        # The hub's errors have no common base: refused, not found, offline, no space, a broken proxy.
        raise _nowhere(name, _hub_reason(problem)) from problem


def _hub_reason(problem: Exception) -> str:
    kind = type(problem).__name__
    offline = "offline mode is on and it is not in the cache"
    known = {
        "RepositoryNotFoundError": "Hugging Face has no such repository, or the token may not see it",
        "GatedRepoError": "the repository is gated: accept its terms on Hugging Face and give a token with --hf-token",
        "RevisionNotFoundError": "the repository has no such revision",
        "EntryNotFoundError": "the repository has no such file",
        "RemoteEntryNotFoundError": "the repository has no such file",
        "LocalEntryNotFoundError": "Hugging Face cannot be reached and it is not in the cache",
        "OfflineModeIsEnabled": offline,
        "HFValidationError": "that is not a path and not a repository id",
    }
    if kind == "LocalEntryNotFoundError" and os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return offline
    return known.get(kind) or f"fetching it from Hugging Face failed: {kind}: {str(problem).splitlines()[0][:300]}"


def _nowhere(name: str, reason: str) -> ModelFileError:
    known = ", ".join(catalogue.names())
    return ModelFileError(
        f"model {name!r} cannot be found: {reason}{near_miss(name, catalogue.names())}",
        code="model-not-found",
        fix=f"give a folder, a .gguf file, a Hugging Face repository id, or one of: {known}",
    )


def model_kind(path: Path) -> str:
    """`gguf` or `folder`; `ModelFileError` for anything that holds no model."""
    if path.is_dir():
        return _folder_kind(path)
    if is_gguf(path) or path.suffix.lower() == ".gguf":
        return "gguf"
    raise ModelFileError(
        f"{path} is not a model: it is neither a folder with a config.json nor a GGUF file",
        code="model-file",
    )


def _folder_kind(path: Path) -> str:
    if (path / "config.json").is_file():
        return "folder"
    ggufs = sorted(file.name for file in path.glob("*.gguf"))
    hint = f"give the path of one of its GGUF files: {', '.join(ggufs[:5])}" if ggufs else "check the path"
    if (path / "params.json").is_file():
        hint = "it is in Mistral's own format, which is not supported: use the Hugging Face format"
    what = f"the folder {path} has no config.json"
    if (path / "config.json").is_symlink():
        what += f": it is a link to {(path / 'config.json').readlink()}, which does not exist"
    raise ModelFileError(what, code="model-file", fix=hint)
