"""Bodies of the routes that load and unload adapters. What is missing is told by the route, as vLLM does."""

from __future__ import annotations

from typing import ClassVar

from hardpoint.front_end.server.protocol.base import RequestBody
from hardpoint.front_end.server.refusals import UNLOAD_ADAPTER, FieldRules


class LoadLoRAAdapterRequest(RequestBody):
    """Serve the adapter in a folder under a name; with `load_inplace` in place of the one that has it."""

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadLoRAAdapterRequest(RequestBody):
    """Serve an adapter no more."""

    rules: ClassVar[FieldRules] = UNLOAD_ADAPTER

    lora_name: str = ""
    lora_int_id: int | None = None
