"""Finding an adapter by the model name of a request."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Set
from typing import Any

from hardpoint.extensions.lora_resolvers import FilesystemResolver, HfHubResolver
from hardpoint.extensions.registry import registry
from hardpoint.log import init_logger
from hardpoint.types.lora_request import LoRARequest

logger = init_logger(__name__)

_KEY = "lora_resolvers"


class LoRAResolver(ABC):
    """Turns an unknown model name into an adapter.

    Built   by whoever registers it; the registry takes the object.
    Called  in the front end, for a request whose model is unknown, in order of registration, where
            VLLM_ALLOW_RUNTIME_LORA_UPDATING is set and the engine has adapters. Requests that name the same model
            meanwhile wait for the one answer.
    Blocks  it is awaited; other requests go on. What takes long without awaiting holds all of them up.
    Fault   what it raises is logged and the next resolver is asked; so it is when what it found cannot be loaded.
    """

    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """The adapter for this base model, or None. `lora_name` comes from a client: trust nothing in it.

        Of the answer only `lora_path` and `base_model_name` count: the name is the client's, the id is given anew.
        """


LoRAResolver.register(FilesystemResolver)
LoRAResolver.register(HfHubResolver)


class _LoRAResolverRegistry:
    """The registry of resolvers under vLLM's names."""

    def get_supported_resolvers(self) -> Set[str]:
        """Names of the registered resolvers."""
        return set(registry(_KEY).names())

    def register_resolver(self, resolver_name: str, resolver: Any) -> None:
        """Add a resolver; one of the same name is replaced, with a WARNING."""
        method = getattr(resolver, "resolve_lora", None)
        if isinstance(resolver, type) or not inspect.iscoroutinefunction(method):
            logger.warning(
                "LoRA resolver %r is no object with an async resolve_lora: it will fail at every request", resolver_name
            )
        registry(_KEY).register(resolver_name, resolver)

    def get_resolver(self, resolver_name: str) -> LoRAResolver:
        """A resolver by name; KeyError naming those there are."""
        known = registry(_KEY)
        if resolver_name not in known:
            names = ", ".join(known.names()) or "none"
            raise KeyError(f"there is no LoRA resolver {resolver_name!r}; registered: {names}")
        return known.load(resolver_name)


LoRAResolverRegistry = _LoRAResolverRegistry()
