"""JSON schemas as backends need them: held against the keywords a backend keeps, and put into plain terms.

A backend that met a keyword it does not know would leave it out and let wrong answers through. So a
keyword of JSON Schema that is not among a backend's own is refused by name, whatever the library says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from hardpoint.contracts.structured_output import GrammarError, MalformedConstraint

TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})

# Keywords whose value is a schema, a list of schemas, or schemas by name.
_ONE = (
    "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "additionalItems", "contains", "propertyNames",
    "not", "if", "then", "else", "contentSchema",
)  # fmt: skip
_LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_COUNTS = (
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)
_NUMBERS = ("minimum", "maximum", "multipleOf")
_TEXTS = ("pattern", "format", "$ref")
# Every keyword that restricts values; any other word is an annotation, which JSON Schema ignores.
KEYWORDS = frozenset({
    *_ONE, *_LIST, *_NAMED, *_COUNTS, *_NUMBERS, *_TEXTS, "type", "enum", "const", "required", "items", "uniqueItems",
    "exclusiveMinimum", "exclusiveMaximum", "dependentRequired", "dependencies", "$dynamicRef", "$recursiveRef",
}) - {"contentSchema"}  # fmt: skip
_DEFINITIONS = frozenset({"$defs", "definitions"})

_DAY = r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE = r"[1-9][0-9]{3}-" + _DAY
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
# Formats as expressions: each allows a part of what the format does, and nothing else.
FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "uuid": "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    "ipv4": rf"^({_OCTET}\.){{3}}{_OCTET}$",
    "email": r"^[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9]+(-[A-Za-z0-9]+)*(\.[A-Za-z0-9]+(-[A-Za-z0-9]+)*)+$",
}
# The other formats that JSON Schema defines; those outside it (int32, password ...) are annotations.
OTHER_FORMATS = frozenset({
    "duration", "idn-email", "hostname", "idn-hostname", "ipv6", "uri", "uri-reference", "iri", "iri-reference",
    "uri-template", "json-pointer", "relative-json-pointer", "regex",
})  # fmt: skip


@dataclass(frozen=True)
class SchemaRules:
    """What a backend keeps of JSON Schema.

    keywords  those it keeps
    alone     of these, those beside which it looks at nothing else
    formats   formats it keeps beside the ones that are put as patterns
    needs_type  whether it looks at a keyword only if the type that it belongs to is stated, and at a required
              name only if that is among the properties
    """

    keywords: frozenset[str]
    alone: frozenset[str] = frozenset()
    formats: frozenset[str] = frozenset()
    needs_type: bool = False


def read_schema(text: str) -> Any:
    """The schema of a text; GrammarError for one that is none."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise MalformedConstraint(f"the schema is not JSON: {problem}") from None
    if not isinstance(schema, dict | bool):
        raise MalformedConstraint(f"a schema is an object, true or false, not {type(schema).__name__}")
    return schema


def prepare(schema: Any, rules: SchemaRules, closed: bool = False) -> Any:
    """Check a schema against the rules of a backend and return it in plain terms.

    Formats become patterns, foreign formats go, and with `closed` objects take only properties that are named.
    Raises GrammarError naming the first keyword that is malformed or cannot be kept.
    """
    for path, node in _walk(schema, "#"):
        _check(node, path, rules)
        for reference in [node["$ref"]] if "$ref" in node else []:
            resolve(schema, reference, path)
    _check_circles(schema)
    if schema is False:
        raise GrammarError("no value satisfies the schema false")
    if schema is True:
        return {}
    return _plain(schema, closed)


def _walk(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema object with its place, in order; GrammarError where a schema should be and is none."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise GrammarError(f"{path} must be a schema (an object, true or false), not {_brief(schema)}")
    yield path, schema
    for place, child in children(schema, path):
        yield from _walk(child, place)


def children(schema: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside one, with their places."""
    for word, value in schema.items():
        place = f"{path}/{word}"
        if word in _ONE or (word == "items" and not isinstance(value, list)):
            yield place, value
        elif word in _LIST or word == "items":
            if not isinstance(value, list) or (not value and word != "items"):
                raise GrammarError(f"{place} must be a list of schemas, not {_brief(value)}")
            yield from ((f"{place}/{index}", child) for index, child in enumerate(value))
        elif word in _NAMED:
            if not isinstance(value, dict):
                raise GrammarError(f"{place} must map names to schemas, not {_brief(value)}")
            yield from ((f"{place}/{name}", child) for name, child in value.items())


def _check(node: dict[str, Any], path: str, rules: SchemaRules) -> None:
    _check_stated(node, path, rules)
    for word, value in node.items():
        if word not in KEYWORDS:
            continue
        place = f"{path}/{word}"
        _check_value(word, value, place)
        if _asks_nothing(word, value):
            continue
        if word == "format":
            known = rules.formats | (FORMAT_PATTERNS.keys() if "pattern" in rules.keywords else frozenset())
            if value in OTHER_FORMATS | FORMAT_PATTERNS.keys() and value not in known:
                raise GrammarError(f"the format {value!r} at {place} cannot be kept")
        elif word not in rules.keywords and word not in _DEFINITIONS:
            raise GrammarError(f"the keyword {word!r} at {place} cannot be kept")
        if word in rules.alone:
            _check_alone(node, word, path)
        # No grammar counts a name that comes twice as one.
        if word == "minProperties" and value > max(1, len(set(node.get("required", ())))):
            raise GrammarError(f"the keyword {word!r} at {place} cannot be kept beyond what is required")


def _check_stated(node: dict[str, Any], path: str, rules: SchemaRules) -> None:
    words = {word for word in node if word in KEYWORDS and word not in _DEFINITIONS}
    if not rules.needs_type or words & rules.alone:
        return
    if words and not isinstance(node.get("type"), str):
        raise GrammarError(f"the schema at {path} cannot be kept without one type")
    missing = sorted(set(node.get("required", ())) - set(node.get("properties", ())))
    if missing:
        raise GrammarError(f"the required name {missing[0]!r} at {path} cannot be kept outside properties")


def _asks_nothing(word: str, value: Any) -> bool:
    return (word == "uniqueItems" and value is False) or (word == "minContains" and value == 0)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_bound(value: Any) -> bool:
    # A word of its own, or, in early drafts, what turns the bound beside it into an exclusive one.
    return isinstance(value, bool) or _is_number(value)


def _are_types(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


# Keyword -> what its value must be, and whether it is.
_VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "type": (f"of {', '.join(sorted(TYPES))}", _are_types),
    **dict.fromkeys(_COUNTS, ("a whole number, at least 0", _is_count)),
    **dict.fromkeys(_NUMBERS, ("a number", _is_number)),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), ("a number", _is_bound)),
    **dict.fromkeys(_TEXTS, ("a text", lambda value: isinstance(value, str))),
    "required": ("a list of names", _are_names),
    "enum": ("a list of values", lambda value: isinstance(value, list) and bool(value)),
}


def _check_value(word: str, value: Any, place: str) -> None:
    wanted, is_fine = _VALUES.get(word, ("", None))
    if is_fine is not None and not is_fine(value):
        raise GrammarError(f"{place} must be {wanted}, not {_brief(value)}")
    # Validators divide fractions in binary: what is a multiple on paper is none to them.
    if word == "multipleOf" and (value <= 0 or value != int(value)):
        raise GrammarError(f"the keyword 'multipleOf' at {place} cannot be kept for {value}: only whole numbers")


def _check_alone(node: dict[str, Any], word: str, path: str) -> None:
    beside = {other for other in node if other in KEYWORDS and other not in _DEFINITIONS and other != word}
    if word in {"enum", "const"} and "type" in beside:
        values = node["enum"] if word == "enum" else [node["const"]]
        names = node["type"] if isinstance(node["type"], list) else [node["type"]]
        if all(any(is_of_type(value, name) for name in names) for value in values):
            beside.discard("type")
    if beside:
        raise GrammarError(f"the keyword {min(beside)!r} beside {word!r} at {path} cannot be kept")


def is_of_type(value: Any, name: str) -> bool:
    """Whether a JSON value is of a JSON Schema type."""
    if name in {"integer", "number"}:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (name == "number" or float(value).is_integer())
    kinds: dict[str, type] = {"string": str, "boolean": bool, "null": type(None), "object": dict, "array": list}
    return isinstance(value, kinds[name])


def resolve(schema: Any, reference: str, path: str) -> Any:
    """What a reference points at; GrammarError when there is nothing, or it is outside the schema."""
    if reference != "#" and not reference.startswith("#/"):
        raise GrammarError(f"the $ref {_brief(reference)} at {path} is not inside the schema (#/...)")
    found = schema
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            raise GrammarError(f"the $ref {_brief(reference)} at {path} points at nothing")
    return found


def _check_circles(schema: Any) -> None:
    """Refuse a schema that is defined by itself, without a value between the two."""
    done: set[int] = set()
    for path, node in _walk(schema, "#"):
        _follow(schema, node, path, [], done)


def _follow(schema: Any, node: Any, path: str, above: list[int], done: set[int]) -> None:
    if not isinstance(node, dict) or id(node) in done:
        return
    if id(node) in above:
        raise GrammarError(f"the schema at {path} refers to itself and describes nothing")
    same_value = [child for word in ("allOf", "anyOf", "oneOf") for child in node.get(word, ())]
    if "$ref" in node:
        same_value.append(resolve(schema, node["$ref"], path))
    for child in same_value:
        _follow(schema, child, path, [*above, id(node)], done)
    done.add(id(node))


def _plain(schema: Any, closed: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    out = dict(schema)
    for word, value in schema.items():
        if word in _ONE or (word == "items" and isinstance(value, dict)):
            out[word] = _plain(value, closed)
        elif word in _LIST or word == "items":
            out[word] = [_plain(child, closed) for child in value] if isinstance(value, list) else value
        elif word in _NAMED:
            out[word] = {name: _plain(child, closed) for name, child in value.items()}
        elif word in KEYWORDS and _asks_nothing(word, value):
            del out[word]
    if closed and ("properties" in out or out.get("type") == "object"):
        out.setdefault("additionalProperties", False)
    _settle_format(out)
    return out


def _settle_format(node: dict[str, Any]) -> None:
    name = node.get("format")
    if name in FORMAT_PATTERNS and "pattern" not in node:
        node["pattern"] = FORMAT_PATTERNS[name]
        del node["format"]
    elif name is not None and name not in FORMAT_PATTERNS and name not in OTHER_FORMATS:
        del node["format"]


_LOOKS_AROUND = re.compile(r"\(\?(?:[=!<]|P[=>])|\\[bBAzZ1-9kG]")


def why_irregular(expression: str) -> str | None:
    """Why an expression is not regular in the strict sense: it looks around or back; None when it may be."""
    found = _LOOKS_AROUND.search(expression.replace("\\\\", ""))
    return f"{found[0]!r} in a regex cannot be kept" if found else None


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


_PLAIN_ESCAPE = re.compile(r"([.^$*+?{}\[\]\\|()\-/&~#])")


def choice_regex(choices: list[str]) -> str:
    """An expression that matches exactly the given texts."""
    return "|".join(f"({_PLAIN_ESCAPE.sub(lambda found: chr(92) + found[1], choice)})" for choice in choices)
