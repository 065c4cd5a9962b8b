"""/server_info: configuration, environment and system, without anything secret."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import sys
from typing import Any

from hardpoint import __version__
from hardpoint.env import VARIABLES, envs

_SECRET_WORDS = ("token", "key", "secret", "password", "salt")
_NOT_SECRET = ("tokenizer", "tokens", "token_ids", "token_id", "max_num", "keyfile", "key_rank")
_HIDDEN = "(hidden)"
_PACKAGES = ("torch", "transformers", "tokenizers", "fastapi", "uvicorn", "msgspec", "pyzmq", "numpy")


def server_facts(vllm_config: Any, config_format: str) -> dict[str, Any]:
    """The answer of /server_info.

    config_format  `text` gives the configuration as one text, `json` as nested objects
    """
    plain = _plain(vllm_config)
    return {
        "vllm_config": plain if config_format == "json" else repr(plain),
        "vllm_env": {v.name: _safe(v.name, getattr(envs, v.name)) for v in VARIABLES if v.name in os.environ},
        "system_env": _system(),
    }


def _system() -> dict[str, Any]:
    packages: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    return {
        "hardpoint": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "packages": packages,
    }


def _is_secret(name: str) -> bool:
    lowered = name.lower()
    return any(word in lowered for word in _SECRET_WORDS) and not any(word in lowered for word in _NOT_SECRET)


def _safe(name: str, value: Any) -> Any:
    return _HIDDEN if value and _is_secret(name) and not isinstance(value, bool) else _plain(value)


def _plain(value: Any, depth: int = 0) -> Any:
    """Plain data of a config tree; what is no data becomes text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth > 12:
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        return {name: _named(name, getattr(value, name, None), depth) for name in names}
    if isinstance(value, dict):
        return {str(key): _named(str(key), item, depth) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, depth + 1) for item in value]
    to_dict = getattr(value, "to_dict", None)
    return _plain(to_dict(), depth + 1) if callable(to_dict) and not isinstance(value, type) else str(value)


def _named(name: str, value: Any, depth: int) -> Any:
    if isinstance(value, str) and value and _is_secret(name):
        return _HIDDEN
    return _plain(value, depth + 1)
