"""`--lora-modules`: NAME=FOLDER, or JSON with name, path and base_model_name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hardpoint.errors import ConfigError

_FIELDS = {"name", "path", "base_model_name", "is_3d_lora_weight"}


@dataclass(frozen=True)
class LoRAModulePath:
    """An adapter that is served from the start. `base_model_name` is shown as its parent."""

    name: str
    path: str
    base_model_name: str | None = None


def parse_lora_modules(words: Sequence[str], served_names: Sequence[str]) -> list[LoRAModulePath]:
    """Read the flag's words; ConfigError for one that cannot be understood and for a name that is taken."""
    modules = [module for word in words for module in _of_word(word)]
    taken = set(served_names)
    for module in modules:
        if module.name in taken:
            raise _bad(f"the name {module.name!r} is taken", "give every adapter a name of its own")
        taken.add(module.name)
    return modules


def _of_word(word: str) -> list[LoRAModulePath]:
    if not word.lstrip().startswith(("{", "[")):
        name, equals, path = word.partition("=")
        if not (name and equals and path):
            raise _bad(f"{word!r} is neither NAME=FOLDER nor JSON")
        return [LoRAModulePath(name, path)]
    try:
        given = json.loads(word)
    except ValueError as error:
        raise _bad(f"{word!r} is not JSON: {error}") from None
    return [_of_facts(facts) for facts in (given if isinstance(given, list) else [given])]


def _of_facts(facts: Any) -> LoRAModulePath:
    if not isinstance(facts, dict):
        raise _bad(f"{facts!r} is not an object")
    unknown = facts.keys() - _FIELDS
    if unknown:
        raise _bad(f"{', '.join(sorted(unknown))} is unknown", f"known are {', '.join(sorted(_FIELDS))}")
    if facts.get("is_3d_lora_weight"):
        raise _bad("is_3d_lora_weight: adapters of experts are not supported", "leave it out")
    name, path, base = (facts.get(key) for key in ("name", "path", "base_model_name"))
    if not (isinstance(name, str) and name and isinstance(path, str) and path):
        raise _bad(f"{facts!r} has no name or no path")
    if base is not None and not isinstance(base, str):
        raise _bad(f"base_model_name is {base!r}, not a text")
    return LoRAModulePath(name, path, base)


def _bad(what: str, fix: str = "write NAME=FOLDER, or JSON with name and path") -> ConfigError:
    return ConfigError(f"--lora-modules: {what}", code="flag-value", origin="--lora-modules", fix=fix)
