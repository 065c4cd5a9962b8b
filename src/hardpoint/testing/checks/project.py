"""The suite for a project's entry points: they name groups that exist, and objects of the right kind."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path
from typing import Any

from hardpoint.extensions.contract_versions import unmet
from hardpoint.extensions.points import GROUPS
from hardpoint.extensions.refs import load_ref
from hardpoint.extensions.rows import Group, Value
from hardpoint.extensions.typed_values import near_miss
from hardpoint.testing.failures import ContractFailure, explained, require, require_call

_GROUPS = {row.group: row for row in GROUPS}
_LOGITS = "hardpoint.contracts.logits_processor:LogitsProcessorV1"


def check_project(project: Path | str) -> dict[str, Any]:
    """Import every entry point of a project's pyproject.toml as a server would; name -> object.

    The project's modules must be importable: run the tests from its root, or install it.
    """
    path = Path(project) / "pyproject.toml"
    facts = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {})
    published = facts.get("entry-points", {})
    ours = {group: points for group, points in published.items() if group.startswith(("vllm", "hardpoint"))}
    require(ours, str(path), "it publishes no entry point in a group of ours", f"add one of {', '.join(_GROUPS)}")
    found = {}
    for group, points in ours.items():
        row = _GROUPS.get(group)
        if row is None:
            raise ContractFailure(str(path), f"there is no group {group!r}{near_miss(group, _GROUPS)}", "correct it")
        for name, ref in points.items():
            found[name] = _loaded(row, name, ref)
    return found


def _loaded(row: Group, name: str, ref: str) -> Any:
    subject = f"{row.group}: {name} = {ref}"
    require(name == name.strip() and "," not in name, subject, "its name cannot be written into VLLM_PLUGINS",
            "use letters, digits, - and _")  # fmt: skip
    with explained(subject, "importing it", "correct the reference or the module"):
        value = load_ref(ref)
    needs = unmet(ref.partition(":")[0])
    require(not needs, subject, needs, "correct HARDPOINT_CONTRACTS, or use a version of Hardpoint that fits")
    if row.value is Value.CLASS:
        bases = tuple(load_ref(base) for base in {row.contract, *([_LOGITS] if row.key == "logits_processors" else [])})
        right = isinstance(value, type) and issubclass(value, bases)
        require(right, subject, f"it is {value!r}, not a class of the contract", f"derive it from {row.contract}")
        return value
    require(callable(value), subject, f"it is {value!r}, which cannot be called", "name a function or class")
    require_call(value, subject, "a function without arguments")
    coroutine = inspect.iscoroutinefunction(value)
    require(not coroutine, subject, "it is a coroutine function, and nothing awaits it", "write `def`")
    return value
