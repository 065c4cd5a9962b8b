"""What a request's choice means, and the schemas that demanded calls are held to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hardpoint.errors import VLLMValidationError
from hardpoint.front_end.parsers.tool_choice import ToolMode, choice_of, constrain
from hardpoint.front_end.parsers.tool_facts import closed, find_tool_properties, schema_of_calls

CHAT = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
FLAT = {"type": "function", "name": "g", "parameters": {"properties": {"b": {"type": "string"}}}}


def asked(choice, tools=(CHAT, FLAT), **more):
    given = {"parallel_tool_calls": True, "structured_outputs": None, "response_format": {"type": "json_object"}}
    return SimpleNamespace(tools=list(tools), tool_choice=choice, **{**given, **more})


@pytest.mark.parametrize(
    ("choice", "mode", "named"),
    [
        (None, ToolMode.NONE, ""),
        ("none", ToolMode.NONE, ""),
        ("auto", ToolMode.AUTO, ""),
        ("required", ToolMode.REQUIRED, ""),
        ({"type": "function", "function": {"name": "f"}}, ToolMode.NAMED, "f"),
        ({"type": "function", "name": "g"}, ToolMode.NAMED, "g"),
        (SimpleNamespace(type="function", name="g"), ToolMode.NAMED, "g"),
    ],
)
def test_choices_of_both_apis(choice, mode, named):
    found = choice_of(asked(choice))
    assert (found.mode, found.named) == (mode, named)
    assert choice_of(asked(choice, tools=[])).mode is ToolMode.NONE


def test_a_function_that_was_not_given_is_refused():
    with pytest.raises(VLLMValidationError, match="'h'"):
        choice_of(asked({"type": "function", "name": "h"}))


def test_a_demanded_call_takes_the_place_of_the_format():
    request = constrain(asked("required"))
    assert request.response_format is None
    assert request.structured_outputs.json["minItems"] == 1
    assert constrain(asked("auto")).structured_outputs is None
    named = constrain(asked({"type": "function", "name": "g"})).structured_outputs.json
    assert named == {"properties": {"b": {"type": "string"}}, "additionalProperties": False}


def test_one_tool_needs_no_alternatives_and_no_parameters_are_an_empty_object():
    schema = schema_of_calls([{"type": "function", "function": {"name": "f"}}], parallel=False)
    assert schema["maxItems"] == 1
    assert schema["items"]["properties"]["parameters"] == {
        "type": "object", "properties": {}, "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
        {"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}]},
        {"type": "object"},
        {"type": "string"},
        True,
    ],
)
def test_what_says_itself_what_it_takes_is_left_open(schema):
    assert closed(schema) == schema


def test_objects_are_closed_wherever_they_are():
    inner = {"properties": {"a": {"type": "string"}}}
    shut = {**inner, "additionalProperties": False}
    schema = {"properties": {"x": inner, "y": {"items": inner}}, "$defs": {"d": inner}}
    properties = {"x": shut, "y": {"items": shut}}
    assert closed(schema) == {"properties": properties, "$defs": {"d": shut}, "additionalProperties": False}


def test_definitions_of_one_name_are_kept_apart():
    def tool(name, kind):
        place = {"$ref": "#/$defs/place"}
        defs = {"place": {"type": kind}, "same": {"type": "null"}}
        return {"type": "function", "name": name, "parameters": {"properties": {"a": place}, "$defs": defs}}

    schema = schema_of_calls([tool("f", "string"), tool("g", "integer")], parallel=True)
    kinds = []
    for option in schema["items"]["anyOf"]:
        reference = option["properties"]["parameters"]["properties"]["a"]["$ref"]
        kinds.append(schema["$defs"][reference.removeprefix("#/$defs/")]["type"])
    assert kinds == ["string", "integer"]
    assert len(schema["$defs"]) == 3


def test_properties_of_tools_that_are_odd_are_none():
    assert find_tool_properties(None, "f") == {}
    assert find_tool_properties([{"function": {"name": "f", "parameters": {"properties": 3}}}], "f") == {}
    assert find_tool_properties([FLAT], "g") == {"b": {"type": "string"}}
