"""Whatever schema a client sends, what a backend lets through satisfies it, or the schema is refused."""

from __future__ import annotations

import json
import random
from functools import cache

import jsonschema
import pytest
from grammar_tools import compiled, make_backend, random_text
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from hardpoint.contracts.structured_output import GrammarError, StructuredOutputOptions
from hardpoint.extensions.builtins import BUILTINS

backend = cache(make_backend)
names = st.sampled_from(["a", "b", "name", "x y", 'q"', "ü"])
values = st.one_of(
    st.none(), st.booleans(), st.integers(-20, 20), st.sampled_from([1.5, "a", "", 'b"\\', "ü", [1], {"a": 1}])
)
counts = st.integers(0, 4)
patterns = st.sampled_from(
    ["^a+$", "b", "^[a-c]{2,4}$", "^(foo|bar)$", r"^\d{2}$", r"\w", "^x", '^"$', r"\.$", "^[^a]+$"]
)
formats = st.sampled_from(["date", "date-time", "time", "uuid", "ipv4", "email", "int32", "ipv6", "hostname", "uri"])


def some(**keywords):
    return st.fixed_dictionaries({}, optional=keywords)


def objects(inner):
    named = st.dictionaries(names, inner, max_size=3)
    return st.builds(
        lambda base, required: {"type": "object", **base, **({"required": required} if required else {})},
        some(
            properties=named, additionalProperties=st.one_of(st.booleans(), inner),
            patternProperties=st.dictionaries(patterns, inner, max_size=1), minProperties=counts, maxProperties=counts,
            propertyNames=some(pattern=patterns), dependentRequired=st.just({"a": ["b"]}),
        ),
        st.lists(names, unique=True, max_size=2),
    )  # fmt: skip


def arrays(inner):
    return some(
        type=st.just("array"), items=inner, minItems=counts, maxItems=counts, uniqueItems=st.booleans(),
        prefixItems=st.lists(inner, min_size=1, max_size=2), contains=inner,
    )  # fmt: skip


def combined(inner):
    several = st.lists(inner, min_size=1, max_size=3)
    return some(anyOf=several, allOf=several, oneOf=several, **{"not": inner, "if": inner, "then": inner})


numbers = st.builds(
    lambda kind, rest: {"type": kind, **rest},
    st.sampled_from(["integer", "number"]),
    some(
        minimum=st.integers(-50, 50), maximum=st.integers(-50, 50), exclusiveMinimum=st.integers(-9, 9),
        exclusiveMaximum=st.sampled_from([3, 0.5]), multipleOf=st.sampled_from([1, 3, 0.1]),
    ),
)  # fmt: skip
texts = st.builds(
    lambda rest: {"type": "string", **rest},
    some(minLength=counts, maxLength=counts, pattern=patterns, format=formats),
)
leaves = st.one_of(
    texts, numbers,
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}, {"type": ["number"]}]),
    st.sampled_from([{"$ref": "#/$defs/d"}, {"$ref": "#"}]),
    st.builds(lambda v: {"const": v}, values),
    st.builds(lambda v, t: {"enum": v, **t}, st.lists(values, min_size=1, max_size=3), some(type=st.just("string"))),
    st.sampled_from([True, False, {}, {"title": "x", "description": "y", "default": 1}]),
)  # fmt: skip
schemas = st.builds(
    lambda schema, definition: {**schema, "$defs": {"d": definition}} if isinstance(schema, dict) else schema,
    st.recursive(leaves, lambda inner: st.one_of(objects(inner), arrays(inner), combined(inner)), max_leaves=6),
    leaves.filter(lambda leaf: not (isinstance(leaf, dict) and "$ref" in leaf)),
)


@pytest.mark.parametrize("name", BUILTINS["structured_output_backends"])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(schema=schemas, seed=st.integers(0, 2**32))
def test_every_answer_satisfies_its_schema(name, schema, seed):
    try:
        grammar = compiled(backend(name), StructuredOutputOptions.JSON, json.dumps(schema))
    except GrammarError:
        event("refused")
        return
    rng = random.Random(seed)
    for _ in range(3):
        text = random_text(grammar.fork(), rng)
        event("cut" if text is None else "ended")
        if text is not None:
            jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
