"""LoRA load and unload, present with VLLM_ALLOW_RUNTIME_LORA_UPDATING."""

from __future__ import annotations

from fastapi import APIRouter

from hardpoint.front_end.server.errors import not_implemented

router = APIRouter()


@router.post("/v1/load_lora_adapter")
@router.post("/v1/unload_lora_adapter")
async def change_adapters() -> None:
    """Refused: this server runs models without adapters."""
    raise not_implemented("LoRA adapters are not available in this server")
