"""Find and load the tokenizer that belongs to a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hardpoint.config.gguf_file import GGUFFile, is_gguf
from hardpoint.errors import ConfigError, ModelFileError
from hardpoint.front_end.tokenizers.from_folder import tokenizer_from_folder
from hardpoint.front_end.tokenizers.from_gguf import tokenizer_from_gguf
from hardpoint.front_end.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from hardpoint.config.sections import ModelConfig

# `slow` is what vLLM calls transformers' Python tokenizers, which give the same ids.
MODES = ("auto", "hf", "slow")


def get_tokenizer(model_config: ModelConfig) -> Tokenizer | None:
    """The tokenizer of a model; None with `skip_tokenizer_init`.

    Raises `ConfigError` for a mode that is not known, `ModelFileError` for files that cannot be used.
    """
    if model_config.skip_tokenizer_init:
        return None
    if model_config.tokenizer_mode not in MODES:
        raise ConfigError(
            f"tokenizer mode {model_config.tokenizer_mode!r} is not supported",
            code="tokenizer-mode",
            origin="--tokenizer-mode",
            fix=f"use one of {', '.join(MODES)}",
        )
    return load_tokenizer(model_config.tokenizer_path or model_config.tokenizer or model_config.model)


def load_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer of a local folder or GGUF file."""
    path = Path(name).expanduser()
    if path.is_file() and is_gguf(path):
        return Tokenizer(tokenizer_from_gguf(GGUFFile.open(path).metadata, str(path)))
    if path.is_file() and path.name == "tokenizer.json":
        path = path.parent
    if not path.is_dir():
        raise ModelFileError(f"tokenizer {str(name)!r} is neither a folder nor a GGUF file", code="tokenizer-missing")
    return Tokenizer(tokenizer_from_folder(path))
