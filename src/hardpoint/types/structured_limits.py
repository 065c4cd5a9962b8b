"""How large a constraint may be, told without compiling it: asked by the front end and again by the engine core."""

from __future__ import annotations

import json
import re
from typing import Any, Protocol

from hardpoint.types.sampling_params import StructuredOutputsParams

# A group that holds nothing but a repetition and is repeated itself: (a+)+, ([0-9]*)*, (?:\w+)*.
_REPEATED_REPETITION = re.compile(r"\((?:\?:)?(?:\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\()\[\]{}|*+?.^$]|\.)[*+]\??\)[*+]")


_NOTHING = type(None)
_KINDS: dict[str, tuple[type, ...]] = {
    "json": (str, dict, _NOTHING),
    "regex": (str, _NOTHING),
    "choice": (list, _NOTHING),
    "grammar": (str, _NOTHING),
    "json_object": (bool, _NOTHING),
    "structural_tag": (str, _NOTHING),
    "whitespace_pattern": (str, _NOTHING),
    "disable_any_whitespace": (bool,),
    "disable_additional_properties": (bool,),
}


class Limits(Protocol):
    """The settings that are read here; a `StructuredOutputsConfig` has them."""

    max_spec_bytes: int
    max_spec_depth: int
    max_choices: int


def why_beyond_limits(params: StructuredOutputsParams, limits: Limits) -> str | None:
    """Why a constraint is not accepted, in words for the client; None when it is within the limits."""
    wrong = next((name for name, kinds in _KINDS.items() if not isinstance(getattr(params, name), kinds)), None)
    if wrong is not None:
        return f"structured_outputs.{wrong} cannot be {type(getattr(params, wrong)).__name__}"
    for kind in ("json", "regex", "grammar", "structural_tag", "whitespace_pattern"):
        value = getattr(params, kind)
        reason = _why_text(kind, value, limits) if isinstance(value, str) else None
        if reason is not None:
            return reason
    if params.json is not None and not isinstance(params.json, str):
        try:
            return _why_text("json", json.dumps(params.json), limits)
        except RecursionError:
            return f"the json is nested too deep, at most {limits.max_spec_depth} are accepted"
        except (TypeError, ValueError) as problem:
            return f"the json is not plain data: {problem}"
    if params.regex is not None and (found := _REPEATED_REPETITION.search(params.regex)):
        return f"the regex repeats a repetition ({found[0]}), which is ambiguous: leave one of the two out"
    if params.choice is not None:
        return _why_choice(params.choice, limits)
    return None


def _why_text(kind: str, text: str, limits: Limits) -> str | None:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > limits.max_spec_bytes:
        return f"the {kind} has {size} bytes, at most {limits.max_spec_bytes} are accepted"
    if "\0" in text:
        return f"the {kind} has a NUL character"
    depth = json_depth(text) if kind in {"json", "structural_tag"} else _bracket_depth(text)
    if depth > limits.max_spec_depth:
        return f"the {kind} is nested {depth} deep, at most {limits.max_spec_depth} are accepted"
    if kind == "json":
        return _why_many_values(text, limits)
    return None


def json_depth(text: str) -> int:
    """How deep brackets are nested in a JSON text, without reading it as such."""
    outside = re.sub(r'"(?:\\.|[^"\\])*"', "", text)
    return _deepest(outside, "{[", "}]")


def _bracket_depth(text: str) -> int:
    return _deepest(re.sub(r"\\.", "", text), "(", ")")


def _deepest(text: str, opening: str, closing: str) -> int:
    depth = deepest = 0
    for found in re.findall(f"[{re.escape(opening + closing)}]", text):
        depth += 1 if found in opening else -1
        deepest = max(deepest, depth)
    return deepest


_SIGNS = re.compile(r'"(?:\\.|[^"\\])*"|[\[\]{},]')
_ENUM = re.compile(r'"enum"\s*:\s*\[')


def _why_many_values(text: str, limits: Limits) -> str | None:
    # Values of all enumerations together, roughly: what stands between commas.
    count = sum(_values_from(text, found.end(), limits.max_choices) for found in _ENUM.finditer(text))
    if count > limits.max_choices:
        return f"the enumerations of the json have more than {limits.max_choices} values"
    return None


def _values_from(text: str, start: int, enough: int) -> int:
    count, depth = 1, 1
    for found in _SIGNS.finditer(text, start):
        sign = found[0]
        if sign in "[{":
            depth += 1
        elif sign in "]}":
            depth -= 1
        elif sign == "," and depth == 1:
            count += 1
        if depth == 0 or count > enough:
            break
    return count


def _why_choice(choices: Any, limits: Limits) -> str | None:
    if not isinstance(choices, list) or not all(isinstance(one, str) for one in choices):
        return "choice must be a list of texts"
    if "" in choices:
        return "choice must not hold an empty text"
    if len(choices) > limits.max_choices:
        return f"choice has {len(choices)} texts, at most {limits.max_choices} are accepted"
    size = sum(len(one.encode("utf-8", "surrogatepass")) for one in choices)
    if size > limits.max_spec_bytes:
        return f"choice has {size} bytes, at most {limits.max_spec_bytes} are accepted"
    return None
