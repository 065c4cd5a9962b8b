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
    # Three tokens of each of two texts, as the suite numbers them.
    vectors = [[3.0, 4.0], [0.0, 0.0], [3.0, 4.0]]
    answer = check_io_processor(AcmeProcessor, {"texts": ["a", "b"]}, output_of=lambda prompt: vectors)
    assert [one["dense"] for one in answer] == [pytest.approx([0.6, 0.8])] * 2
    assert answer[0]["sparse"] == pytest.approx({"1": 5.0, "2": 0.0, "3": 5.0})


def test_it_refuses_other_data():
    with pytest.raises(ValueError, match="expected"):
        AcmeProcessor(tiny_vllm_config()).parse_data({"text": "a"})
