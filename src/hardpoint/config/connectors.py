"""The class that a connector module path names: found and checked, although nothing uses connectors yet.

Who tries a connector out learns first whether it could be used at all, then that this version has no use for it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from hardpoint.config.sections.base import Section
from hardpoint.errors import ConfigError
from hardpoint.extensions.faults import in_words


class _Kind(NamedTuple):
    """Where a connector's class is named, and the keyword that its constructor must take after config and role."""

    section: str
    path: str
    name: str
    keyword: str


_KINDS = (
    _Kind("kv_transfer_config", "kv_connector_module_path", "kv_connector", "kv_cache_config"),
    _Kind("ec_transfer_config", "ec_connector_module_path", "ec_connector", ""),
)


def check_connector(section: str, value: Any) -> None:
    """Look at a value of the configuration's `section`, if it is one of these: a mapping or the section's object.

    Raises ConfigError (a ValueError) for a class that could not be a connector.
    """
    kind = next((kind for kind in _KINDS if kind.section == section), None)
    given = vars(value) if isinstance(value, Section) else value
    if kind is not None and isinstance(given, Mapping) and given.get(kind.path) is not None:
        connector_class(given, kind)


def connector_class(given: Mapping[str, Any], kind: _Kind) -> type[Any]:
    """The class called `kv_connector` (or `ec_connector`) in the module that the section names."""
    module_name, name = given[kind.path], given.get(kind.name)
    where = f"{kind.section}.{kind.path}"
    if not module_name:
        raise _wrong(f"{where} is empty", "name a module, or leave it out")
    if not name:
        raise _wrong(f"{where} is {module_name!r}, but {kind.name} does not say which class", f"give {kind.name}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise _wrong(f"{where} {module_name!r} cannot be imported: {in_words(error)}", "name a module") from error
    found = getattr(module, name, None)
    if not isinstance(found, type):
        what = "has nothing of that name" if found is None else f"has a {type(found).__name__} there"
        raise _wrong(f"{kind.section}.{kind.name} is {name!r}: the module {module_name} {what}", "name a class")
    _check_constructor(found, kind)
    return found


def _check_constructor(found: type[Any], kind: _Kind) -> None:
    known = inspect.signature(found).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
    if kind.keyword and kind.keyword not in known and not takes_any:
        raise _wrong(
            f"the constructor of {found.__module__}.{found.__qualname__} does not take {kind.keyword}",
            f"write __init__(self, vllm_config, role, {kind.keyword})",
        )


def _wrong(what: str, fix: str) -> ConfigError:
    return ConfigError(what, code="config-connector", fix=fix)
