"""Structural tags: stretches of a free text that follow a schema, begun by a trigger."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from hardpoint.contracts.structured_output import GrammarError


class Tag(NamedTuple):
    """A stretch: `begin`, which starts with `trigger`, then JSON of the schema, then `end`."""

    trigger: str
    begin: str
    schema: Any
    end: str


def is_legacy(tag: Any) -> bool:
    """Whether a structural tag is of the older form, with `structures` and `triggers`."""
    return isinstance(tag, dict) and "structures" in tag


def read_tag(spec: str) -> dict[str, Any]:
    """The object of a structural tag's text."""
    try:
        tag = json.loads(spec)
    except (ValueError, RecursionError) as problem:
        raise GrammarError(f"the structural tag is not JSON: {problem}") from None
    if not isinstance(tag, dict) or not ("structures" in tag or "format" in tag):
        raise GrammarError("a structural tag is an object with format, or with structures and triggers")
    return tag


def legacy_tags(spec: str) -> list[Tag]:
    """The stretches of a tag of the older form; GrammarError for the newer one, or where something is missing."""
    tag = read_tag(spec)
    if not is_legacy(tag):
        raise GrammarError("structural tags with a format cannot be kept, only those with structures and triggers")
    structures, triggers = tag["structures"], tag.get("triggers")
    if not (isinstance(triggers, list) and triggers and all(isinstance(one, str) and one for one in triggers)):
        raise GrammarError("triggers must be a list of texts")
    if not (isinstance(structures, list) and structures):
        raise GrammarError("structures must be a list of objects with begin, schema and end")
    return [_tag(index, one, triggers) for index, one in enumerate(structures)]


def _tag(index: int, structure: Any, triggers: list[str]) -> Tag:
    if not isinstance(structure, dict) or not isinstance(structure.get("schema"), dict | bool):
        raise GrammarError(f"structures.{index} must be an object with begin, schema and end")
    begin, end = structure.get("begin"), structure.get("end", "")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise GrammarError(f"begin and end of structures.{index} must be texts")
    trigger = next((one for one in triggers if begin.startswith(one)), None)
    if trigger is None:
        raise GrammarError(f"begin of structures.{index} starts with none of the triggers")
    return Tag(trigger, begin, structure["schema"], end)
