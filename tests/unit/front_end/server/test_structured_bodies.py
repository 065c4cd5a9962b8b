"""How bodies ask for structured output."""

from __future__ import annotations

import json

import pytest

from hardpoint.errors import VLLMValidationError
from hardpoint.front_end.server.protocol.completions import CompletionRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TAG = {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}


def asked(**body):
    return CompletionRequest(prompt="x", **body).to_sampling_params(5, {}).structured_outputs


@pytest.mark.parametrize(
    ("body", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, "json", SCHEMA),
        ({"structured_outputs": {"regex": "a+", "choice": None}}, "regex", "a+"),
        ({"guided_json": SCHEMA}, "json", SCHEMA),
        ({"guided_regex": "a+", "guided_decoding_backend": "auto"}, "regex", "a+"),
        ({"guided_choice": ["a", "b"], "guided_json": None}, "choice", ["a", "b"]),
        ({"guided_grammar": "start: A"}, "grammar", "start: A"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_each_way_to_ask(body, kind, value):
    assert getattr(asked(**body), kind) == value


def test_options_stand_beside_the_format():
    params = asked(
        response_format={"type": "json_object"}, structured_outputs={"disable_any_whitespace": True},
    )  # fmt: skip
    assert params.json_object
    assert params.disable_any_whitespace
    older = asked(guided_json=SCHEMA, guided_whitespace_pattern="[ ]?")
    assert older.whitespace_pattern == "[ ]?"


def test_a_structural_tag_is_passed_on_as_text():
    assert json.loads(asked(response_format=TAG).structural_tag) == TAG


def test_text_asks_for_nothing():
    assert asked(response_format={"type": "text"}) is None
    assert asked() is None


def test_older_names_are_no_unknown_fields():
    assert not CompletionRequest(prompt="x", guided_regex="a").__pydantic_extra__


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        {"response_format": {}},
        {"guided_regex": "a", "guided_choice": ["b"]},
    ],
    ids=str,
)
def test_contradictions_and_gaps_are_refused(body):
    with pytest.raises((VLLMValidationError, ValueError)):
        asked(**body)
