"""Strict tools that the model may call by itself: each format's grammar takes its calls, and no others."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import jsonschema
import pytest
from grammar_tools import accepts, compiled, make_backend, random_text

from hardpoint.contracts.structured_output import StructuredOutputOptions
from hardpoint.extensions.registry import registry
from hardpoint.front_end.parsers.format_parser import FormatToolParser

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Zürich"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": 'a "name"'}},
]
GOOD = '{"city": "Zürich", "days": 3}'
PLAIN = SimpleNamespace(all_special_tokens=[], get_vocab=dict)


def parser_of(name: str) -> FormatToolParser:
    return registry("tool_parsers").load(name)(PLAIN, TOOLS)


def framed() -> list[str]:
    found = {name: registry("tool_parsers").load(name) for name in registry("tool_parsers").names()}
    return [name for name, kind in found.items() if getattr(getattr(kind, "format", None), "frame", None)]


FRAMED = framed()


@pytest.fixture(scope="module", params=FRAMED)
def case(request):
    parser = parser_of(request.param)
    tag = parser.get_structural_tag(SimpleNamespace(tools=TOOLS))
    return parser, compiled(make_backend("guidance"), StructuredOutputOptions.STRUCTURAL_TAG, tag)


def call(parser: FormatToolParser, arguments: str, name: str = '"weather"') -> str:
    frame = parser.format.frame
    return frame.begin.replace("{name}", name) + arguments + frame.end


def test_several_formats_can_be_held_to_a_schema():
    assert {"hermes", "ernie45", "longcat", "granite-20b-fc"} <= set(FRAMED)


def test_the_grammar_takes_what_the_parser_reads(case):
    parser, grammar = case
    text = "Let me see. " + call(parser, GOOD) + call(parser, "{}", '"a \\"name\\""')
    assert accepts(grammar, text)
    found = parser.extract_tool_calls(text, None)
    assert [(one.function.name, one.function.arguments) for one in found.tool_calls] == [
        ("weather", GOOD),
        ('a "name"', "{}"),
    ]
    assert accepts(grammar, "No call at all.")


@pytest.mark.parametrize(
    "arguments", ['{"city": "Oslo", "days": 3}', '{"city": "Rome"}', "{}", '{"city": "Rome", "days": 10}']
)
def test_the_grammar_takes_no_arguments_beside_the_schema(case, arguments):
    parser, grammar = case
    assert not accepts(grammar, call(parser, arguments))


def test_the_grammar_takes_no_other_function(case):
    parser, grammar = case
    assert not accepts(grammar, call(parser, GOOD, '"other"'))


def test_random_answers_have_calls_that_satisfy_the_schema(case):
    parser, grammar = case
    begin = parser.format.frame.begin.replace("{name}", '"weather"')
    seen = 0
    for seed in range(12):
        grown = grammar.fork()
        assert grown.accept_tokens("r", list(begin.encode()))
        text = random_text(grown, random.Random(seed), 300)
        if text is None:
            continue
        for one in type(parser)(PLAIN, TOOLS).extract_tool_calls(begin + text, None).tool_calls:
            if one.function.name == "weather":
                jsonschema.validate(json.loads(one.function.arguments), SCHEMA)
                seen += 1
    assert seen


def test_marks_without_a_text_cannot_be_asked_for():
    special = SimpleNamespace(all_special_tokens=["<tool_call>"], get_vocab=dict)
    parser = registry("tool_parsers").load("hermes")(special, TOOLS)
    assert parser.get_structural_tag(SimpleNamespace(tools=TOOLS)) is None
