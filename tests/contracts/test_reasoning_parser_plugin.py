"""We ship no such file; the example stands for one."""

from __future__ import annotations

from hardpoint.cli.plugins_new import examples
from hardpoint.extensions.parser_choice import choose_parser
from hardpoint.extensions.registry import isolated
from hardpoint.testing import check_reasoning_parser


def test_the_example():
    file = examples() / "reasoning_parser_plugin" / "acme_reasoning_parser_plugin" / "__init__.py"
    with isolated():
        check_reasoning_parser(choose_parser("reasoning_parsers", "acme_file", str(file)), ["<think>a</think>b"])
