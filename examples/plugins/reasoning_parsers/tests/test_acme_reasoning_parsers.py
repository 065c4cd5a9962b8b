from pathlib import Path

from acme_reasoning_parsers import AcmeReasoningParser, register

from hardpoint.extensions.registry import registry
from hardpoint.testing import check_project, check_reasoning_parser

PROJECT = Path(__file__).parent.parent


def test_its_entry_point():
    assert check_project(PROJECT) == {"acme_reasoning_parsers": register}


def test_it_keeps_the_contract():
    check_reasoning_parser(AcmeReasoningParser, ["Six times seven.\n=> 42", "\n\n=> 42\n=> 43", "on and on\n="])


def test_it_is_registered(isolated_registries):
    register()
    assert registry("reasoning_parsers").load("acme") is AcmeReasoningParser
