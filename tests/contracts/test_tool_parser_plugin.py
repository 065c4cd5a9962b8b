"""We ship no such file; the example stands for one."""

from __future__ import annotations

from hardpoint.cli.plugins_new import examples
from hardpoint.extensions.parser_choice import choose_parser
from hardpoint.extensions.registry import isolated
from hardpoint.testing import check_tool_parser


def test_the_example():
    file = examples() / "tool_parser_plugin" / "acme_tool_parser_plugin" / "__init__.py"
    with isolated():
        parser = choose_parser("tool_parsers", "acme_file", str(file))
        check_tool_parser(parser, ['<tool_call>{"name": "functions.f", "arguments": {}}</tool_call>'])
