from __future__ import annotations

import pytest
from example_plugins import load_example

from hardpoint.extensions.builtins import BUILTINS
from hardpoint.extensions.registry import registry
from hardpoint.testing import ContractFailure, check_tool_parser

CALL = '{"name": "f", "arguments": {"a": "x\\n☃", "b": [1, {"c": null}]}}'
ANSWERS = [
    f"Let me see. <tool_call>{CALL}</tool_call> and on",
    f"[TOOL_CALLS][{CALL}, {CALL}]",
    f"functools[{CALL}]",
    "[f(a='x', b=[1, None]), g()]",
    "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>",
    '{"name": "f", "parameters": {}}; {"name": "g"',
    "<tool_call>{]</tool_call><tool_calls>[1]</tool_calls><tool_c",
]


@pytest.mark.parametrize("name", BUILTINS["tool_parsers"])
def test_built_in_parsers_read_any_text_the_same_way_whole_and_cut(name):
    check_tool_parser(registry("tool_parsers").load(name), ANSWERS)


def test_the_example():
    check_tool_parser(load_example("tool_parsers").AcmeToolParser, ANSWERS)


def test_a_parser_that_forgets_what_it_held_back_is_found_out():
    class Forgetful(load_example("tool_parsers").AcmeToolParser):
        def finish_streaming(self):
            return None

    with pytest.raises(ContractFailure, match="finish_streaming"):
        check_tool_parser(Forgetful, ["no line break"])
