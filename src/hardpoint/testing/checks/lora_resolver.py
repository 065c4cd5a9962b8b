"""The suite for LoRA resolvers."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from hardpoint.contracts.lora_resolver import LoRAResolver
from hardpoint.testing.failures import explained, name_of, require, require_call
from hardpoint.types.lora_request import LoRARequest

_SHAPE = "resolve_lora(self, base_model_name, lora_name)"
# What clients may send, and no adapter is called.
HOSTILE_NAMES = (
    "", ".", "..", "/", "../evil", "a/../../evil", "..\\evil", "/etc", "C:\\evil", "evil\0", "a\nb", "x" * 5000,
    "%2e%2e/evil", "~", "☃" * 300,
)  # fmt: skip


def check_lora_resolver(resolver: Any, base_model_name: str, known: str | None = None) -> None:
    """Ask a resolver for names no adapter has, for other base models, and for one that it knows.

    known  the name of an adapter of `base_model_name`; left out, no name need be known
    """
    subject = name_of(type(resolver))
    require(not isinstance(resolver, type), subject, "a class was given", "register an object: the registry takes it")
    require(isinstance(resolver, LoRAResolver), subject, "it is no LoRAResolver", "derive it from the contract's class")
    method = type(resolver).resolve_lora
    require(inspect.iscoroutinefunction(method), subject, "resolve_lora is not async", "declare it with async def")
    require_call(method, subject, _SHAPE, None, base_model_name, "name")
    asyncio.run(_ask(resolver, subject, base_model_name, known))


async def _ask(resolver: Any, subject: str, base: str, known: str | None) -> None:
    for name in HOSTILE_NAMES:
        with explained(subject, f"resolve_lora for the name {name[:40]!r}", "names come from clients: answer None"):
            found = await resolver.resolve_lora(base, name)
        require(
            found is None, subject, f"it has an adapter for the name {name[:40]!r}",
            "answer None for a name that is not exactly an adapter's",
        )  # fmt: skip
    if known is None:
        return
    with explained(subject, f"resolve_lora for {known!r}", "it knows this name"):
        found, again = [await resolver.resolve_lora(base, known) for _ in range(2)]
    require(
        isinstance(found, LoRARequest), subject, f"resolve_lora answered {type(found).__name__} for {known!r}",
        "answer with a LoRARequest, or None for an unknown name",
    )  # fmt: skip
    require(
        again is not None and again.lora_path == found.lora_path, subject, "a second request finds something else",
        "the same name means the same adapter",
    )  # fmt: skip
    with explained(subject, "resolve_lora for another base model", "answer None: the adapter would not fit"):
        other = await resolver.resolve_lora(f"not-{base}", known)
    require(other is None, subject, "it gives the adapter to any base model", "compare base_model_name")
