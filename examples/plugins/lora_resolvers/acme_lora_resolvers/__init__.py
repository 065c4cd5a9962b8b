"""A LoRA resolver that knows the adapters of one JSON file, registered by a general plugin."""

import asyncio
import json
import os
from pathlib import Path

from hardpoint.contracts.lora_resolver import LoRAResolver, LoRAResolverRegistry
from hardpoint.types.lora_request import LoRARequest


class ShelfResolver(LoRAResolver):
    """Looks names up in a file like `{"name": {"base": "model", "path": "/folder"}}`.

    The file is read anew for every unknown name, so that adapters can be added while the server runs. A client's
    name is only compared with those in the file; no path is made from it.
    """

    def __init__(self, shelf: Path) -> None:
        self.shelf = shelf

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """The adapter of that name, if the file has it for this model."""
        # In a thread, so that a slow disk does not hold other requests up.
        if not self.shelf.is_file():
            return None
        known = json.loads(await asyncio.to_thread(self.shelf.read_text))
        entry = known.get(lora_name)
        if entry is None or entry["base"] != base_model_name:
            return None
        # The number is replaced by one that is free.
        return LoRARequest(lora_name=lora_name, lora_int_id=1, lora_path=entry["path"])


def register() -> None:
    """The general plugin: it runs in every process, and imports nothing heavy."""
    shelf = Path(os.environ.get("ACME_SHELF", "shelf.json"))
    LoRAResolverRegistry.register_resolver("acme", ShelfResolver(shelf))
