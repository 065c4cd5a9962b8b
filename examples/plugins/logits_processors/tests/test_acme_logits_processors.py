from pathlib import Path

import pytest
from acme_logits_processors import AcmeOnly

from hardpoint.testing import check_logits_processor, check_project, engine_here
from hardpoint.types.sampling_params import SamplingParams

PROJECT = Path(__file__).parent.parent

PARAMS = SamplingParams(extra_args={"acme_only": [5, 7]})


def test_its_entry_point():
    assert check_project(PROJECT) == {"acme_logits_processors": AcmeOnly}


def test_it_keeps_the_contract():
    check_logits_processor(AcmeOnly, PARAMS)


@pytest.mark.parametrize("wrong", ["5", [], ["a"], [True]])
def test_it_refuses_other_arguments(wrong):
    with pytest.raises(ValueError, match="token ids"):
        AcmeOnly.validate_params(SamplingParams(extra_args={"acme_only": wrong}))


def test_requests_get_what_they_ask_for():
    prompts = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [4, 5]}]
    params = [SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, extra_args={"acme_only": [5, 7]}),
              SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)]  # fmt: skip
    with engine_here(logits_processors=[AcmeOnly]) as llm:
        mine, other = llm.generate(prompts, params, use_tqdm=False)
    assert set(mine.outputs[0].token_ids) <= {5, 7}
    assert not set(other.outputs[0].token_ids) <= {5, 7}
