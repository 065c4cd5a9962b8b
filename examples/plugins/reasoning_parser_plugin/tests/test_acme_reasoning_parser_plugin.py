from pathlib import Path

from hardpoint.extensions.parser_choice import choose_parser
from hardpoint.testing import check_reasoning_parser

FILE = Path(__file__).parent.parent / "acme_reasoning_parser_plugin" / "__init__.py"


def test_the_file_registers_a_parser_that_keeps_the_contract(isolated_registries):
    parser = choose_parser("reasoning_parsers", "acme_file", str(FILE))
    check_reasoning_parser(parser, ["<think>Six times seven.</think>42", "on and on\n</thi"])
    assert parser(None).extract_reasoning("<think>Six times seven.</think>42", None) == (None, "42")
