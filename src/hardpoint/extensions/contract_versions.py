"""Versions of contracts: what a plugin says it needs, held against what the table has, before it is used.

A plugin's module (or its top-level package) may state `HARDPOINT_CONTRACTS = {"stat_loggers": ">=1.0,<2"}`: keys
of the table, each with a range. A change that breaks plugins raises a contract's first number, one that adds to
it the second.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hardpoint.extensions.points import ROWS
from hardpoint.extensions.rows import State
from hardpoint.extensions.typed_values import near_miss

ATTRIBUTE = "HARDPOINT_CONTRACTS"
_PART = re.compile(r"\s*(~=|==|!=|>=|<=|>|<|)\s*(\d+(?:\.\d+)*)\s*")
_ROWS = {row.key: row for row in reversed(ROWS)}

Version = tuple[int, ...]


def versions() -> dict[str, str]:
    """Key to version of every contract that this version of Hardpoint has."""
    return {row.key: row.version for row in ROWS if row.state is State.BUILT}


def unmet(module_name: str) -> str:
    """What an imported module says it needs and does not get here, in words; empty when all is well."""
    root = module_name.partition(".")[0]
    modules = [sys.modules.get(name) for name in dict.fromkeys((module_name, root))]
    needs = next((found for module in modules if (found := getattr(module, ATTRIBUTE, None)) is not None), None)
    if needs is None:
        return ""
    if not isinstance(needs, Mapping):
        return f"{ATTRIBUTE} is {needs!r}, not a dict of contracts and ranges"
    return "; ".join(filter(None, (_unmet(key, needs[key]) for key in needs)))


def _unmet(key: Any, wanted: Any) -> str:
    row = _ROWS.get(key)
    if row is None:
        return f"it needs the contract {key!r}, which does not exist here{near_miss(str(key), _ROWS)}"
    if row.state is State.PLANNED:
        return f"it needs the contract {key!r}, which this version does not have yet"
    try:
        fits = matches(row.version, wanted)
    except ValueError as error:
        return f"it states {wanted!r} for the contract {key!r}: {error}"
    return "" if fits else f"it needs version {wanted} of the contract {key!r}, and here it is {row.version}"


def matches(version: str, wanted: str) -> bool:
    """Whether a version lies in a range such as `>=1.0,<2`; a bare `1.2` means from 1.2 to below 2.

    Raises ValueError for what is not a range.
    """
    if not isinstance(wanted, str) or not wanted.strip():
        raise ValueError("write a range such as '>=1.0,<2'")
    have = _parse(version)
    return all(_holds(have, part) for part in wanted.split(","))


def _holds(have: Version, part: str) -> bool:
    found = _PART.fullmatch(part)
    if found is None:
        raise ValueError(f"{part.strip()!r} is not a bound; write a range such as '>=1.0,<2'")
    bound = _parse(found[2])
    if found[1] in ("", "~="):
        same = max(1, len(bound) - 1)
        return have[:same] == bound[:same] and _even(have, bound) >= _even(bound, have)
    return _COMPARE[found[1]](_even(have, bound), _even(bound, have))


def _parse(text: str) -> Version:
    return tuple(int(number) for number in text.split("."))


def _even(one: Version, other: Version) -> Version:
    return one + (0,) * (len(other) - len(one))


_COMPARE: dict[str, Callable[[Version, Version], bool]] = {
    "==": lambda have, bound: have == bound,
    "!=": lambda have, bound: have != bound,
    ">=": lambda have, bound: have >= bound,
    "<=": lambda have, bound: have <= bound,
    ">": lambda have, bound: have > bound,
    "<": lambda have, bound: have < bound,
}
