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


def is_strict(tool: Any) -> bool:
    """Whether a tool's calls must satisfy its schema."""
    return bool(_part(_part(tool, "function") or tool, "strict"))


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


# Words beside which closing an object could make it impossible.
_OPEN_WORDS = {"additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
_MOST_NESTED = 64


def closed(schema: Any, depth: int = 0) -> Any:
    """A schema whose objects have the properties they name and no others, where it does not say.

    A model that is held to the open schema may go on inventing properties.
    """
    if not isinstance(schema, dict) or depth > _MOST_NESTED:
        return schema
    found = dict(schema)
    for word in ("properties", "$defs", "definitions"):
        if isinstance(found.get(word), dict):
            found[word] = {name: closed(part, depth + 1) for name, part in found[word].items()}
    if "items" in found:
        found["items"] = closed(found["items"], depth + 1)
    if isinstance(found.get("properties"), dict) and not _OPEN_WORDS & found.keys():
        found["additionalProperties"] = False
    return found


def schema_of_arguments(tool: Any) -> dict[str, Any]:
    """What a call's arguments are held to."""
    found: dict[str, Any] = closed(tool_parameters(tool))
    return found


def _with_shared(schema: dict[str, Any], word: str, shared: dict[str, Any]) -> dict[str, Any]:
    """The schema without its definitions, which are put where references begin: at the root, which is not its own.

    Definitions of several tools may have one name: the later ones get another.
    """
    own = schema.pop(word, None)
    if not isinstance(own, dict):
        return schema
    names = {}
    for name, part in own.items():
        new, number = name, 1
        while shared.get(new, part) != part:
            new, number = f"{name}_{number}", number + 1
        names[f"#/{word}/{name}"] = f"#/{word}/{new}"
        shared[new] = part
    for name in names.values():
        shared[name.rpartition("/")[2]] = _renamed(shared[name.rpartition("/")[2]], names)
    renamed: dict[str, Any] = _renamed(schema, names)
    return renamed


def _renamed(thing: Any, names: dict[str, str], depth: int = 0) -> Any:
    """A schema with its references changed."""
    if depth > _MOST_NESTED:
        return thing
    if isinstance(thing, list):
        return [_renamed(part, names, depth + 1) for part in thing]
    if not isinstance(thing, dict):
        return thing
    found = {word: _renamed(part, names, depth + 1) for word, part in thing.items()}
    if isinstance(found.get("$ref"), str):
        found["$ref"] = names.get(found["$ref"], found["$ref"])
    return found


def schema_of_calls(tools: Iterable[Any], parallel: bool) -> dict[str, Any]:
    """The JSON of a list of at least one call, for `tool_choice: required`.

    parallel  whether there may be more than one
    """
    shared: dict[str, Any] = {}
    options = []
    for tool in tools:
        parameters = schema_of_arguments(tool)
        for word in ("$defs", "definitions"):
            parameters = _with_shared(parameters, word, shared.setdefault(word, {}))
        properties = {"name": {"type": "string", "enum": [tool_name(tool)]}, "parameters": parameters}
        options.append({"type": "object", "properties": properties, "required": ["name", "parameters"],
                        "additionalProperties": False})  # fmt: skip
    item = options[0] if len(options) == 1 else {"anyOf": options}
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": item}
    if not parallel:
        schema["maxItems"] = 1
    schema.update({word: found for word, found in shared.items() if found})
    return schema
