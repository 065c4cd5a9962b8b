"""How large a constraint may be."""

from __future__ import annotations

import json
import time

import pytest

from hardpoint.config.sections import StructuredOutputsConfig
from hardpoint.types.sampling_params import StructuredOutputsParams
from hardpoint.types.structured_limits import why_beyond_limits

LIMITS = StructuredOutputsConfig(max_spec_bytes=1000, max_spec_depth=5, max_choices=10)


def why(**kind):
    return why_beyond_limits(StructuredOutputsParams(**kind), LIMITS)


@pytest.mark.parametrize(
    "kind",
    [
        {"json": {"type": "object", "properties": {"a": {"enum": ["]", ",", '"enum": [']}}}},
        {"json": '{"type": "string", "description": "[[[[[[[[[["}'},
        {"json": {"properties": {"enum": {"type": "string"}}}},
        {"regex": r"([a-z]+,)*[a-z]+(\(\(\(\(\(\()?"},
        {"regex": "(?:ab+)+|[(]+"},
        {"choice": ["a"] * 10},
        {"grammar": 'start: "a"'},
        {"json_object": True},
    ],
    ids=str,
)
def test_what_is_within_the_limits(kind):
    assert why(**kind) is None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ({"json": json.dumps({"description": "x" * 1000})}, "bytes, at most 1000"),
        ({"json": '{"not":' * 6 + "{}" + "}" * 6}, "nested 7 deep, at most 5"),
        ({"json": {"enum": list(range(11))}}, "more than 10 values"),
        ({"json": {"properties": {"a": {"enum": list(range(6))}, "b": {"enum": list(range(6))}}}}, "more than 10"),
        ({"json": {"enum": {1, 2}}}, "not plain data"),
        ({"regex": "((((((a))))))"}, "nested 6 deep"),
        ({"regex": "x(a+)+$"}, r"\(a\+\)\+"),
        ({"regex": r"(?:\d*)*"}, "repeats a repetition"),
        ({"regex": "([^)]+)*"}, "repeats a repetition"),
        ({"regex": "a\0"}, "NUL"),
        ({"regex": 5}, "cannot be int"),
        ({"choice": ["a"] * 11}, "11 texts"),
        ({"choice": ["a", 5]}, "list of texts"),
        ({"choice": ["a", ""]}, "empty text"),
        ({"choice": ["a" * 1001]}, "1001 bytes"),
        ({"grammar": "a" * 1001}, "1001 bytes"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_beyond_them(kind, reason):
    import re

    found = why(**kind)
    assert found
    assert re.search(reason, found), found


def test_a_huge_text_is_refused_at_once():
    # Not a matter of speed: what is quadratic here would take minutes.
    limits = StructuredOutputsConfig()
    many = '{"anyOf": [' + ",".join('{"enum": [1, 2]}' for _ in range(20_000)) + "]}"
    began = time.monotonic()
    assert "more than 10000 values" in why_beyond_limits(StructuredOutputsParams(json=many), limits)
    assert time.monotonic() - began < 30
