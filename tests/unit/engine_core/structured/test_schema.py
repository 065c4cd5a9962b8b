"""Schemas held against what a backend keeps."""

from __future__ import annotations

import re

import pytest

from hardpoint.contracts.structured_output import GrammarError, MalformedConstraint
from hardpoint.engine_core.structured.schema import FORMAT_PATTERNS, SchemaRules, choice_regex, prepare, read_schema

RULES = SchemaRules(frozenset({"type", "enum", "const", "anyOf", "properties", "items", "pattern", "$ref", "required"}))
STRICT = SchemaRules(RULES.keywords - {"pattern"}, alone=frozenset({"enum", "const", "$ref"}), needs_type=True)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"uniqueItems": True}, "'uniqueItems' at #/uniqueItems"),
        ({"properties": {"a": {"items": {"not": {}}}}}, "'not' at #/properties/a/items/not"),
        ({"anyOf": [{"type": "string"}, {"if": {}}]}, "'if' at #/anyOf/1/if"),
        ({"type": "strnig"}, "#/type must be of"),
        ({"type": []}, "#/type must be of"),
        ({"properties": []}, "#/properties must map names"),
        ({"anyOf": []}, "#/anyOf must be a list"),
        ({"items": 5}, "#/items must be a schema"),
        ({"required": "a"}, "#/required must be a list of names"),
        ({"enum": []}, "#/enum must be a list of values"),
        ({"minLength": -1}, "#/minLength must be a whole number"),
        ({"minimum": "5"}, "#/minimum must be a number"),
        ({"multipleOf": 0.5}, "only whole numbers"),
        ({"$ref": "#/$defs/a"}, "points at nothing"),
        ({"$ref": "other.json"}, "not inside the schema"),
        ({"$ref": "#"}, "refers to itself"),
        ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "refers to itself"),
        ({"type": "string", "format": "ipv6"}, "'ipv6' at #/format"),
        (False, "no value satisfies"),
    ],
    ids=str,
)
def test_what_is_wrong_or_not_kept_is_named_with_its_place(schema, named):
    with pytest.raises(GrammarError, match=re.escape(named)):
        prepare(schema, RULES)


def test_words_that_restrict_nothing_pass():
    schema = {"title": "t", "x-own": {"not": 5}, "uniqueItems": False, "default": {"not": 1}, "format": "int32"}
    assert prepare(schema, RULES) == {"title": "t", "x-own": {"not": 5}, "default": {"not": 1}}
    assert prepare({"properties": {"not": {"type": "string"}}}, RULES) == {"properties": {"not": {"type": "string"}}}


def test_a_tree_may_hold_itself():
    tree = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}}
    assert prepare(tree, RULES) == tree


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ["a"], "type": "integer"},
        {"const": "a", "items": {}},
        {"$ref": "#/$defs/a", "type": "string", "$defs": {"a": {"type": "string"}}},
        {"items": {"type": "string"}},
        {"type": ["string", "null"]},
        {"type": "object", "required": ["b"], "properties": {"a": {"type": "string"}}},
        {"type": "string", "format": "date"},
    ],
    ids=str,
)
def test_what_a_backend_would_pass_over_is_refused(schema):
    with pytest.raises(GrammarError):
        prepare(schema, STRICT)


def test_closed_objects():
    schema = {"properties": {"a": {"type": "object"}}}
    assert prepare(schema, RULES, closed=True) == {
        "properties": {"a": {"type": "object", "additionalProperties": False}}, "additionalProperties": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", "2024-02-28", "2024-02-30"),
        ("date-time", "1999-12-31T23:59:59.25Z", "1999-12-31 23:59:59Z"),
        ("time", "00:00:00+02:00", "24:00:00Z"),
        ("ipv4", "255.1.0.99", "256.1.0.99"),
        ("uuid", "12345678-1234-1234-1234-123456789abc", "12345678"),
        ("email", "a.b@c-d.org", "a..b@c.org"),
    ],
)
def test_formats_become_patterns(name, good, bad):
    pattern = prepare({"type": "string", "format": name}, RULES)["pattern"]
    assert pattern == FORMAT_PATTERNS[name]
    assert re.search(pattern, good)
    assert not re.search(pattern, bad)


@pytest.mark.parametrize("text", ["{", "", "5", '"a"', "[1]", "[" * 100_000])
def test_a_text_that_is_no_schema(text):
    with pytest.raises(MalformedConstraint):
        read_schema(text)


def test_choices_as_an_expression():
    choices = ["a.b", "(c)", "d|e", "\\", "ü-/", "[x]{2}"]
    assert all(re.fullmatch(choice_regex(choices), choice) for choice in choices)
    assert not re.fullmatch(choice_regex(choices), "axb")
