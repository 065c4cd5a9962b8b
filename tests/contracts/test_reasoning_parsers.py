from __future__ import annotations

import pytest
from example_plugins import load_example

from hardpoint.extensions.builtins import BUILTINS
from hardpoint.extensions.registry import registry
from hardpoint.testing import ContractFailure, check_reasoning_parser

ANSWERS = [
    "<think>\nsix by seven ☃\n</think>\n\n42",
    "no start</think>42</think>",
    "<think>cut off",
    " <think></think> ",
    "[THINK]a[/THINK]b",
    "Here is my thought process: a\nHere is my response: b",
    "<seed:think>a</seed:think>b",
    "<think>a</think>\n<answer>\nb\n</answer>",
    "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
    "</thin",
]


@pytest.mark.parametrize("name", BUILTINS["reasoning_parsers"])
def test_built_in_parsers_read_any_text_the_same_way_whole_and_cut(name):
    check_reasoning_parser(registry("reasoning_parsers").load(name), ANSWERS)


def test_the_example():
    check_reasoning_parser(load_example("reasoning_parsers").AcmeReasoningParser, ["a\n=> b", "a\n="])


def test_a_parser_that_takes_pieces_for_wholes_is_found_out():
    class Hasty(load_example("reasoning_parsers").AcmeReasoningParser):
        def finish_streaming(self):
            return None

    with pytest.raises(ContractFailure, match="decide by the text alone"):
        check_reasoning_parser(Hasty, ["a\n="])
