"""Finding an adapter by the model name of a request."""

from __future__ import annotations

from abc import ABC, abstractmethod

from hardpoint.types.lora_request import LoRARequest


class LoRAResolver(ABC):
    """Turns an unknown model name into an adapter.

    Built   by whoever registers it; the registry takes the object.
    Called  in the front end, for a request whose model is unknown, in order of registration.
    Blocks  it is awaited; other requests go on.
    Fault   what it raises is logged and the next resolver is asked.
    """

    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """The adapter for this base model, or None. `lora_name` comes from a client: trust nothing in it."""
