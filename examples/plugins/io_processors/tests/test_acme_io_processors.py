from pathlib import Path

import pytest
from acme_io_processors import find_processor
from acme_io_processors.processor import AcmeProcessor

from hardpoint.testing import check_io_processor, check_project, tiny_vllm_config

PROJECT = Path(__file__).parent.parent


def test_its_entry_point():
    assert check_project(PROJECT) == {"acme_io_processors": find_processor}
    assert find_processor() == f"{AcmeProcessor.__module__}.AcmeProcessor"


def test_it_keeps_the_contract():
    answer = check_io_processor(AcmeProcessor, {"texts": ["a", "b"]}, output_of=lambda i: [3.0, 4.0])
    assert answer == {"lengths": [5.0, 5.0]}


def test_it_refuses_other_data():
    with pytest.raises(ValueError, match="expected"):
        AcmeProcessor(tiny_vllm_config()).parse_data({"text": "a"})
