"""Find installed entry points and decide by name which may load. Imports no plugin."""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from hardpoint.env import envs
from hardpoint.extensions.builtins import BUILTIN_ENTRY_POINTS
from hardpoint.extensions.ledger import Origin
from hardpoint.extensions.points import GROUPS
from hardpoint.extensions.rows import Allow, Group

# vLLM's own entry points, where a real vLLM is installed beside us, belong to it and not to us.
_FOREIGN = "vllm"


@dataclass(frozen=True, slots=True)
class Found:
    """One entry point: `name = value` in `group`, published by a distribution or built in."""

    group: str
    name: str
    value: str
    distribution: str
    version: str
    built_in: bool = False

    @property
    def module(self) -> str:
        """The module to import."""
        return self.value.partition(":")[0].strip()

    @property
    def path(self) -> str:
        """The attribute path in that module; empty for the module itself."""
        return self.value.partition(":")[2].partition("[")[0].strip()

    @property
    def package(self) -> str:
        """The distribution in words."""
        return "built in" if self.built_in else f"{self.distribution} {self.version}"

    @property
    def origin(self) -> Origin:
        """Who to attribute to while it loads or runs."""
        return Origin(self.distribution, self.version, self.group, self.name, self.module)

    def origin_with_file(self) -> Origin:
        """The same with the file of its module, once that is imported."""
        module = sys.modules.get(self.module)
        return replace(self.origin, file=getattr(module, "__file__", None) or "")


class Catalogue:
    """The entry points of our groups on one `sys.path`, read once."""

    def __init__(self) -> None:
        self._key: tuple[int, tuple[str, ...]] | None = None
        self._found: dict[str, list[Found]] = {}

    def all(self) -> dict[str, list[Found]]:
        """Group name to entry points: built-in ones first, then in the order of `sys.path`."""
        key = (os.getpid(), tuple(sys.path))
        if key != self._key:
            self._found, self._key = _scan(), key
        return self._found

    def group(self, name: str) -> list[Found]:
        """The entry points of one group, also of one that is not in the table."""
        found = self.all()
        return list(found[name]) if name in found else _scan_group(name)

    def forget(self) -> None:
        """Read everything again next time (tests)."""
        self._key = None


def _scan() -> dict[str, list[Found]]:
    installed = importlib.metadata.entry_points()
    found: dict[str, list[Found]] = {}
    for row in GROUPS:
        ours = BUILTIN_ENTRY_POINTS.get(row.group, {})
        found[row.group] = [Found(row.group, name, ref, "hardpoint", "", True) for name, ref in ours.items()]
        found[row.group] += _published(installed.select(group=row.group))
    return found


def _scan_group(name: str) -> list[Found]:
    return _published(importlib.metadata.entry_points(group=name))


def _published(points: Iterable[Any]) -> list[Found]:
    found = []
    for point in points:
        distribution, version = _identity(point.dist)
        if distribution.lower() != _FOREIGN:
            found.append(Found(point.group, point.name, point.value, distribution, version))
    return found


def _identity(dist: Any) -> tuple[str, str]:
    """Name and version from the head of METADATA: parsing the whole of it costs milliseconds a package."""
    text = (dist.read_text("METADATA") or dist.read_text("PKG-INFO") or "") if dist is not None else ""
    fields: dict[str, str] = {}
    for line in text.split("\n\n", 1)[0].splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.lower(), value.strip())
    return fields.get("name", "unknown"), fields.get("version", "")


catalogue = Catalogue()


@dataclass(frozen=True, slots=True)
class Allowlist:
    """`VLLM_PLUGINS` and `HARDPOINT_PLUGINS_DENY` as they are now.

    names  the parts of VLLM_PLUGINS as written (spaces and empty parts kept), None when unset
    deny   names that never load
    """

    names: tuple[str, ...] | None
    deny: frozenset[str]

    @classmethod
    def read(cls) -> Allowlist:
        """From the process environment."""
        names = envs.VLLM_PLUGINS
        deny = envs.HARDPOINT_PLUGINS_DENY or ()
        return cls(None if names is None else tuple(names), frozenset(n.strip() for n in deny if n.strip()))

    @property
    def is_empty(self) -> bool:
        """Whether VLLM_PLUGINS is set to the empty string."""
        return self.names == ("",)

    def names_it(self, name: str) -> bool:
        """Whether VLLM_PLUGINS is set and has exactly this name."""
        return self.names is not None and name in self.names

    def refusal(self, row: Group | None, name: str) -> str:
        """Why an entry point may not load, in words; empty when it may."""
        allow = row.allow if row is not None else Allow.OPTIONAL
        if name in self.deny:
            return "named in HARDPOINT_PLUGINS_DENY"
        if allow is Allow.IGNORED or self.names_it(name):
            return ""
        if self.names is None:
            return "" if allow is Allow.OPTIONAL else "this group loads only what VLLM_PLUGINS names, and it is not set"
        return "VLLM_PLUGINS is empty" if self.is_empty else "not named in VLLM_PLUGINS"

    def in_words(self) -> str:
        """What the two variables mean, for the log."""
        if self.names is None:
            text = "VLLM_PLUGINS is not set: all plugins load, except endpoint plugins, which must be named"
        elif self.is_empty:
            text = "VLLM_PLUGINS is empty: no plugin loads, except logits processors, which it does not govern"
        else:
            text = f"VLLM_PLUGINS names {', '.join(repr(name) for name in self.names)}: no other plugin loads"
        return text + (f"; HARDPOINT_PLUGINS_DENY: {', '.join(sorted(self.deny))}" if self.deny else "")

    def remarks(self, installed: dict[str, list[Found]]) -> list[tuple[str, str]]:
        """(name, what is odd about it) for each name that does not do what its writer may think."""
        groups: dict[str, set[str]] = {}
        for group, found in installed.items():
            for point in found:
                groups.setdefault(point.name, set()).add(group)
        remarks = []
        for name in self.names or ():
            if self.is_empty or name in groups:
                continue
            remarks.append((name, _remark("VLLM_PLUGINS", name, groups)))
        remarks += [(n, _remark("HARDPOINT_PLUGINS_DENY", n, groups)) for n in sorted(self.deny) if n not in groups]
        return remarks


def _remark(variable: str, name: str, known: Iterable[str]) -> str:
    if not name:
        return f"{variable} has an empty part, such as a comma at an end: it names nothing"
    stripped = name.strip()
    if stripped != name:
        text = f"{variable} has {name!r}, and names are compared with their spaces: it matches no plugin"
        return f"{text}; write {stripped!r}" if stripped in known else text
    near = difflib.get_close_matches(name, list(known), n=2, cutoff=0.75)
    hint = f"did you mean {' or '.join(repr(n) for n in near)}?" if near else "no installed plugin has this name"
    return f"{variable} names {name!r}, which matches no plugin; {hint}"
