"""The parser a flag names: its plugin's file imported first, the name looked up, the class imported."""

from __future__ import annotations

import difflib
from typing import Any

from hardpoint.errors import ConfigError
from hardpoint.extensions.parser_files import FLAGS, import_parser_file, registered_by
from hardpoint.extensions.refs import load_ref
from hardpoint.extensions.registry import registry

_NAME_FLAGS = {"tool_parsers": "--tool-call-parser", "reasoning_parsers": "--reasoning-parser"}
# What a parser must have for either way of answering.
_METHODS = {
    "tool_parsers": ("extract_tool_calls", "extract_tool_calls_streaming"),
    "reasoning_parsers": ("extract_reasoning", "extract_reasoning_streaming"),
}


def choose_parser(key: str, name: str | None, plugin: str | None) -> type[Any] | None:
    """Import the plugin's module or file, then the class registered under `name`; None without a name.

    key  `tool_parsers` or `reasoning_parsers`

    Raises PluginError for a plugin that cannot be imported, ConfigError for a name nobody registered or a class
    that implements nothing, and what importing the class raises.
    """
    if plugin:
        import_parser_file(plugin, key)
    if not name:
        return None
    # A class is checked against its contract, which must be there for that.
    base = load_ref(registry(key).row.base)
    if name not in registry(key):
        raise _unknown(key, name, plugin)
    chosen = registry(key).load(name)
    registry(key).note_use(name, "reads the answers")
    if all(getattr(chosen, method) is getattr(base, method) for method in _METHODS[key]):
        raise ConfigError(
            f"{_NAME_FLAGS[key]} {name!r}: {chosen.__qualname__} implements neither of {', '.join(_METHODS[key])}",
            code="parser-empty",
            origin=registry(key).entry(name).origin.label,
            fix="choose another parser",
        )
    return chosen


def _unknown(key: str, name: str, plugin: str | None) -> ConfigError:
    known = registry(key).names()
    near = difflib.get_close_matches(name, known, n=1)
    what = f"{_NAME_FLAGS[key]} {name!r} is not registered"
    if plugin:
        what += f"; {FLAGS[key]} {plugin!r} registered {', '.join(registered_by(plugin, key)) or 'none'}"
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ConfigError(what, code="parser-unknown", fix=f"{hint}known are: {', '.join(sorted(known))}")
