"""The rows of the alias: what a module of vLLM's is made of, as strings, and how to say it shortly."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Waits:
    """A module or name of vLLM's that is not there yet, and what it waits for."""

    what: str


@dataclass(frozen=True)
class Entry:
    """One module of the alias."""

    # Modules of ours, separated by spaces, whose names show through; the first that has a name owns it.
    home: str = ""
    # name -> "module:attribute", or "module" for a module
    names: Mapping[str, str] = field(default_factory=dict)
    waits: Mapping[str, str] = field(default_factory=dict)

    def locate(self, name: str) -> tuple[str | None, str]:
        """Return (owner module, attribute), or (None, what the name waits for or "")."""
        target = self.names.get(name)
        if target is not None:
            owner, _, attribute = target.partition(":")
            return owner, attribute
        if name in self.waits:
            return None, self.waits[name]
        # Dunder names describe the alias module itself, not its home.
        if not self.home or name.startswith("__"):
            return None, ""
        homes = self.home.split()
        owners = (home for home in homes[:-1] if hasattr(importlib.import_module(home), name))
        return next(owners, homes[-1]), name

    def public_names(self) -> list[str]:
        """The names a star import takes."""
        shown = [name for home in self.home.split() for name in vars(importlib.import_module(home)) if name[0] != "_"]
        return sorted({*self.names, *shown})


def names_from(module: str, names: str) -> dict[str, str]:
    """The `names`, separated by spaces, that live in a module of ours."""
    return {name: f"{module}:{name}" for name in names.split()}


CONFIG = "hardpoint.config"
CONTRACTS = "hardpoint.contracts"
FRONT_END = "hardpoint.front_end"
TYPES = "hardpoint.types"
WORKER = "hardpoint.worker"

# What a missing part waits for, in the words a plugin author sees.
VISION_LAYERS = "attention layers for media encoders"
MEDIA_STEPS = "the inner steps of vLLM's media processors"
TOWER_ADAPTERS = "adapters on media encoders"
MOE = "exchangeable expert kernels"
MAMBA = "state-space models"
MODELS = "more model architectures"
CONNECTORS = "KV and encoder-cache connectors"
OFFLOAD = "KV offloading"
SLEEP = "sleep mode"
SPECULATION = "speculative decoding"
QUANT = "more quantisation methods"
IR = "IR operators"
TRITON = "the Triton kernels"
RL = "weight transfer"
