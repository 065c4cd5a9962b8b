from pathlib import Path

from acme_structured_output_backends import register
from acme_structured_output_backends.choice import AcmeChoiceBackend

from hardpoint.contracts.structured_output import StructuredOutputOptions
from hardpoint.testing import check_project, check_structured_output_backend

PROJECT = Path(__file__).parent.parent
CHOICE = StructuredOutputOptions.CHOICE


def test_its_entry_point():
    assert check_project(PROJECT) == {"acme_structured_output_backends": register}


def test_it_keeps_the_contract():
    check_structured_output_backend(AcmeChoiceBackend, {CHOICE: ('["yes", "yes!", "no"]', "yes!", "maybe")})


def test_it_refuses_what_it_cannot_do():
    assert AcmeChoiceBackend.why_unsupported(StructuredOutputOptions.JSON, "{}")
    assert AcmeChoiceBackend.why_unsupported(CHOICE, '["a"]') is None
