from pathlib import Path

from hardpoint.extensions.parser_choice import choose_parser
from hardpoint.testing import check_tool_parser

FILE = Path(__file__).parent.parent / "acme_tool_parser_plugin" / "__init__.py"


def test_the_file_registers_a_parser_that_keeps_the_contract(isolated_registries):
    parser = choose_parser("tool_parsers", "acme_file", str(FILE))
    check_tool_parser(parser, ['!weather {"city": "Oslo"}\nDone.', "!weather Oslo"])
