from pathlib import Path

from acme_tool_parsers import AcmeToolParser, register

from hardpoint.extensions.registry import registry
from hardpoint.testing import check_project, check_tool_parser

PROJECT = Path(__file__).parent.parent
ANSWERS = ['Let me see.\n!weather {"city": "Oslo"}\n!time {}', "!weather Oslo", "!", 'no !weather {"city": 1}\n']


def test_its_entry_point():
    assert check_project(PROJECT) == {"acme_tool_parsers": register}


def test_it_keeps_the_contract():
    check_tool_parser(AcmeToolParser, ANSWERS)


def test_it_is_registered(isolated_registries):
    register()
    assert registry("tool_parsers").load("acme") is AcmeToolParser
