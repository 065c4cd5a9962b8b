"""The table of the alias: one row per `vllm...` module, as strings.

A row has a home (the module of ours whose names show through), names that live elsewhere,
and names that wait for something we do not have yet. Old paths of earlier releases are rows
like any other, since about a quarter of public plugins still use one. The rows are in `modules`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from hardpoint.compat.modules import engine, front_end, models, user
from hardpoint.compat.rows import Entry, Waits

API_VERSION = "0.32.0"

MODULES: dict[str, Entry | Waits] = {**user.MODULES, **models.MODULES, **engine.MODULES, **front_end.MODULES}


def entry(module: str) -> Entry | Waits | None:
    """The row of a `vllm...` module; below a waiting module everything waits for the same."""
    row = MODULES.get(module)
    if row is not None:
        return row
    parent = module.rpartition(".")[0]
    while parent:
        above = MODULES.get(parent)
        if isinstance(above, Waits):
            return above
        parent = parent.rpartition(".")[0]
    return None


@cache
def known() -> frozenset[str]:
    """Every module path that can be imported."""
    return frozenset(name for name, row in MODULES.items() if isinstance(row, Entry))


def submodules(module: str) -> Iterable[str]:
    """Module paths right below `module` that can be imported."""
    return (name for name in known() if name.rpartition(".")[0] == module)
