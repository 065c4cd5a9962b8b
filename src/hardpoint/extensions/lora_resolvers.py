"""The two LoRA resolvers we ship, and the general-plugin functions that register them.

A resolver turns an unknown model name of a request into a LoRA adapter. Names come from clients:
whatever is not a plain folder below the cache is answered with None, and nothing outside is opened. Both satisfy
`hardpoint.contracts.lora_resolver.LoRAResolver`.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from pathlib import Path
from typing import Any

from hardpoint.env import envs
from hardpoint.errors import ConfigError
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.refs import load_ref
from hardpoint.extensions.registry import registry
from hardpoint.log import init_logger

logger = init_logger("hardpoint.extensions.lora_resolvers")

_LORA_REQUEST = "hardpoint.types.lora_request:LoRARequest"
# All that is read of an adapter, and all that is fetched.
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_LONGEST_NAME = 256
_LARGEST_CONFIG = 1 << 20


class FilesystemResolver:
    """Finds adapters as folders of one cache folder, each with an `adapter_config.json`."""

    def __init__(self, lora_cache_dir: str) -> None:
        self.lora_cache_dir = lora_cache_dir

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any | None:
        """The adapter `lora_name` for this base model as a LoRARequest, or None."""
        folder = _folder_below(Path(self.lora_cache_dir), lora_name)
        if folder is None or not all((folder / name).resolve().is_relative_to(folder) for name in ADAPTER_FILES):
            return None
        return _request(base_model_name, lora_name, folder)


class HfHubResolver(FilesystemResolver):
    """Finds adapters in listed Hugging Face repositories: `owner/repo` or `owner/repo/sub/folder`."""

    def __init__(self, repo_list: list[str]) -> None:
        super().__init__("")
        self.repo_list = repo_list

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any | None:
        """As the filesystem resolver, after fetching the repository into the Hugging Face cache."""
        repo = next((r for r in self.repo_list if lora_name == r or lora_name.startswith(r + "/")), None)
        if repo is None:
            return None
        inner = lora_name[len(repo) + 1 :]
        if lora_name != repo and not _is_plain(inner):
            return None
        wanted = [f"{inner}/{name}" if inner else name for name in ADAPTER_FILES]
        # Others are served meanwhile.
        fetch = load_ref("huggingface_hub:snapshot_download")
        root = Path(await asyncio.to_thread(fetch, repo_id=repo, allow_patterns=wanted))
        return _request(base_model_name, lora_name, root / inner if inner else root)


def register_filesystem_resolver() -> None:
    """Register the filesystem resolver if `VLLM_LORA_RESOLVER_CACHE_DIR` is set; ConfigError if it is no folder."""
    folder = envs.VLLM_LORA_RESOLVER_CACHE_DIR
    if not folder:
        return
    if not Path(folder).is_dir():
        raise ConfigError(
            f"VLLM_LORA_RESOLVER_CACHE_DIR={folder!r} is not a folder",
            code="env-value",
            origin="lora_filesystem_resolver",
            fix="set it to the folder that holds the adapters, or unset it",
        )
    registry("lora_resolvers").register("Filesystem Resolver", FilesystemResolver(folder))


def register_hf_hub_resolver() -> None:
    """Register the Hugging Face resolver if its repositories are listed and `VLLM_PLUGINS` names it."""
    listed = envs.VLLM_LORA_RESOLVER_HF_REPO_LIST
    repos = [repo.strip() for repo in (listed or "").split(",") if repo.strip()]
    if not repos:
        return
    # It downloads on a client's word, so being installed is not consent enough.
    if "lora_hf_hub_resolver" not in (envs.VLLM_PLUGINS or ()):
        what = (
            "VLLM_LORA_RESOLVER_HF_REPO_LIST is set, but VLLM_PLUGINS does not name lora_hf_hub_resolver: it stays off"
        )
        ledger.record("warn", "general", "lora_hf_hub_resolver", detail=what)
        logger.warning("%s. Fix: add lora_hf_hub_resolver to VLLM_PLUGINS", what)
        return
    registry("lora_resolvers").register("Hf Hub Resolver", HfHubResolver(repos))


def _is_plain(name: str) -> bool:
    if not name or len(name) > _LONGEST_NAME or not name.isprintable() or "\\" in name:
        return False
    return all(part not in ("", ".", "..") for part in name.split("/"))


def _folder_below(root: Path, name: str) -> Path | None:
    """The folder `root/name` if it is one and, links followed, still lies below `root`."""
    if not _is_plain(name):
        return None
    base = root.resolve()
    folder = (base / name).resolve()
    return folder if folder != base and folder.is_relative_to(base) and folder.is_dir() else None


def _request(base_model_name: str, lora_name: str, folder: Path) -> Any | None:
    config = folder / "adapter_config.json"
    if not config.is_file() or config.stat().st_size > _LARGEST_CONFIG:
        return None
    try:
        facts = json.loads(config.read_text(encoding="utf-8"))
    except ValueError:
        return None
    if not isinstance(facts, dict) or facts.get("peft_type") != "LORA":
        return None
    if facts.get("base_model_name_or_path") != base_model_name:
        return None
    number = zlib.crc32(lora_name.encode()) or 1
    return load_ref(_LORA_REQUEST)(lora_name=lora_name, lora_int_id=number, lora_path=str(folder))
