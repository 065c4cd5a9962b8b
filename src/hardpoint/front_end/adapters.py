"""LoRA adapters on their way to the engine: may there be any, and where are their files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hardpoint.errors import ModelFileError, VLLMValidationError, without_origin
from hardpoint.extensions.lora_resolvers import ADAPTER_FILES
from hardpoint.extensions.refs import load_ref
from hardpoint.types.lora_request import LoRARequest

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig

_REPO = re.compile(r"^\w[\w.-]*/\w[\w.-]*$")


def checked_adapter(wanted: LoRARequest | None, vllm_config: VllmConfig) -> LoRARequest | None:
    """The adapter of a request with its files on this machine; VLLMValidationError where that cannot be."""
    if wanted is None:
        return None
    if vllm_config.lora_config is None:
        raise VLLMValidationError(
            "LoRA adapters need an engine started with --enable-lora", parameter="lora_request", value=wanted.lora_name
        )
    try:
        return with_local_files(wanted)
    except ModelFileError as error:
        raise VLLMValidationError(
            without_origin(str(error)), parameter="lora_request", value=wanted.lora_name
        ) from None


def with_local_files(wanted: LoRARequest) -> LoRARequest:
    """The adapter with an absolute folder for its path; one that lies on the Hugging Face hub is fetched.

    Raises ModelFileError when there is no such folder, and the hub has no such repository or cannot be asked.
    """
    path = Path(wanted.lora_path).expanduser()
    if not path.is_dir():
        path = _fetched(wanted)
    return msgspec.structs.replace(wanted, lora_path=str(path.absolute()))


def _fetched(wanted: LoRARequest) -> Path:
    name = wanted.lora_path
    reason = "it is neither a folder nor owner/repository on the hub"
    if _REPO.match(name):
        try:
            return Path(load_ref("huggingface_hub:snapshot_download")(repo_id=name, allow_patterns=list(ADAPTER_FILES)))
        except Exception as error:  # of the network, the hub or its client
            reason = f"there is no such folder, and the hub did not give it: {type(error).__name__}"
    raise ModelFileError(
        f"adapter {wanted.lora_name!r}: {name[:200]!r} is not there: {reason}",
        code="lora-missing",
        origin=name[:200],
        fix="give the folder that PEFT's save_pretrained wrote",
    )
