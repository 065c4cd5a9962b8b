"""What a request's tools say, and the JSON a call must be. Functions that plugins use have vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hardpoint.front_end.parsers.calls import partial_mark


def _part(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, dict) else getattr(thing, name, None)


def tool_name(tool: Any) -> str | None:
    """The name of a chat tool (inside `function`) or of a flat one."""
    return _part(_part(tool, "function") or tool, "name")


def tool_parameters(tool: Any) -> dict[str, Any]:
    """The schema of a tool's parameters; an object without properties when it has none."""
    found = _part(_part(tool, "function") or tool, "parameters")
    return found if isinstance(found, dict) and found else {"type": "object", "properties": {}}


def find_tool_name(tools: Iterable[Any] | None, name: str) -> bool:
    """Whether a tool of that name was given."""
    return any(tool_name(tool) == name for tool in tools or ())


def find_tool_properties(tools: Iterable[Any] | None, name: str) -> dict[str, Any]:
    """The schemas of a tool's parameters by name; empty for a tool that was not given."""
    for tool in tools or ():
        if tool_name(tool) == name:
            properties = tool_parameters(tool).get("properties")
            return properties if isinstance(properties, dict) else {}
    return {}


def partial_tag_overlap(text: str, tag: str) -> int:
    """How many characters at the end of a text may be the beginning of a tag."""
    return partial_mark(text, (tag,))


def schema_of_calls(tools: Iterable[Any], parallel: bool) -> dict[str, Any]:
    """The JSON of a list of at least one call, for `tool_choice: required`.

    parallel  whether there may be more than one
    """
    shared: dict[str, Any] = {}
    options = []
    for tool in tools:
        parameters = dict(tool_parameters(tool))
        for word in ("$defs", "definitions"):
            # References begin at the root of the schema, which is ours now.
            shared.setdefault(word, {}).update(parameters.pop(word, None) or {})
        properties = {"name": {"type": "string", "enum": [tool_name(tool)]}, "parameters": parameters}
        options.append({"type": "object", "properties": properties, "required": ["name", "parameters"],
                        "additionalProperties": False})  # fmt: skip
    item = options[0] if len(options) == 1 else {"anyOf": options}
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": item}
    if not parallel:
        schema["maxItems"] = 1
    schema.update({word: found for word, found in shared.items() if found})
    return schema
