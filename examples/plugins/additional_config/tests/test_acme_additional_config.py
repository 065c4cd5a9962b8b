from pathlib import Path

from acme_additional_config import AcmeBan

from hardpoint.testing import check_logits_processor, check_project, engine_here, tiny_vllm_config
from hardpoint.types.sampling_params import SamplingParams

PROJECT = Path(__file__).parent.parent

CONFIG = {"acme": {"ban": [5, 7]}}


def test_its_entry_point():
    assert check_project(PROJECT) == {"acme_additional_config": AcmeBan}


def test_it_keeps_the_contract():
    check_logits_processor(AcmeBan)
    check_logits_processor(AcmeBan, SamplingParams(), tiny_vllm_config(additional_config=CONFIG))


def test_banned_tokens_are_not_written():
    prompt, params = [{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=1, temperature=0)
    with engine_here(logits_processors=[AcmeBan]) as llm:
        best = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids[0]
    config = {"acme": {"ban": [best]}}
    with engine_here(logits_processors=[AcmeBan], additional_config=config) as llm:
        assert llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids[0] != best
