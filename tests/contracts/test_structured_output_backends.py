from __future__ import annotations

import json

import pytest

from hardpoint.contracts.structured_output import StructuredOutputGrammar, StructuredOutputOptions
from hardpoint.extensions.builtins import BUILTINS
from hardpoint.extensions.registry import registry
from hardpoint.testing import ContractFailure, check_structured_output_backend

KINDS = StructuredOutputOptions
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
EVERY = {
    KINDS.CHOICE: ('["yes", "no way", "q\\"/\\\\"]', 'q"/\\', "yes way"),
    KINDS.REGEX: ("[a-c]{2}-[0-9]+", "ab-7", "ab-x"),
    KINDS.JSON: (json.dumps(SCHEMA), '{"a":"y"}', '{"a":"z"}'),
}
MORE = {
    "guidance": {
        KINDS.JSON_OBJECT: ("", '{"k": [1, true, null]}', "[1]"),
        KINDS.GRAMMAR: ('start: "a" NUMBER\nNUMBER: /[0-9]{2}/', "a12", "b12"),
        KINDS.STRUCTURAL_TAG: (json.dumps(TAG), 'so <f>{"a":"x"}</f>', "<f>{a"),
    },
    "xgrammar": {
        KINDS.JSON_OBJECT: ("", '{"k": [1, true, null]}', "[1]"),
        KINDS.GRAMMAR: ('root ::= "a" [0-9]{2}', "a12", "b12"),
        KINDS.STRUCTURAL_TAG: (json.dumps(TAG), 'so <f>{"a":"x"}</f>', "<f>{a"),
    },
    "lm-format-enforcer": {KINDS.JSON_OBJECT: ("", '{"k": "v"}', "[1]")},
}


@pytest.mark.parametrize("name", BUILTINS["structured_output_backends"])
def test_built_in_backends(name):
    check_structured_output_backend(registry("structured_output_backends").load(name), EVERY | MORE.get(name, {}))


def test_the_suite_notices_a_grammar_that_allows_everything():
    backend = registry("structured_output_backends").load("guidance")

    class Lax(backend):
        def compile_grammar(self, request_type, grammar_spec, stop_token_ids=None):
            return super().compile_grammar(KINDS.REGEX, "(.|\n)*", stop_token_ids)

    with pytest.raises(ContractFailure, match="a wrong text is accepted"):
        check_structured_output_backend(Lax, {KINDS.CHOICE: EVERY[KINDS.CHOICE]})


def test_the_suite_notices_what_is_no_backend():
    with pytest.raises(ContractFailure):
        check_structured_output_backend(StructuredOutputGrammar)
