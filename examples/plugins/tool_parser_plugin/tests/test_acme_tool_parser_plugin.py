from pathlib import Path

from hardpoint.extensions.parser_choice import choose_parser
from hardpoint.testing import check_tool_parser

FILE = Path(__file__).parent.parent / "acme_tool_parser_plugin" / "__init__.py"
CALL = '<tool_call>{"name": "functions.weather", "arguments": {"city": "Oslo"}}</tool_call>'


def test_the_file_registers_a_parser_that_keeps_the_contract(isolated_registries):
    parser = choose_parser("tool_parsers", "acme_file", str(FILE))
    check_tool_parser(parser, [f"Let me see.\n{CALL}\n{CALL}", '<tool_call>{"name": "weather"', "functions.weather"])
    (call,) = parser(None).extract_tool_calls(CALL, None).tool_calls
    assert call.function.name == "weather"
