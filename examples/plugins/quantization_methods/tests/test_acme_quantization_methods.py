from pathlib import Path

import torch
from acme_quantization_methods import register
from acme_quantization_methods.int8 import AcmeInt8Config

from hardpoint.testing import check_project, check_quantization_config, engine_here
from hardpoint.types.sampling_params import SamplingParams

PROJECT = Path(__file__).parent.parent


def test_its_entry_point():
    assert check_project(PROJECT) == {"acme_quantization_methods": register}


def test_it_keeps_the_contract():
    check_quantization_config(AcmeInt8Config, close=0.02)


def test_a_model_is_served_with_it(isolated_registries):
    register()
    with engine_here(quantization="acme_int8") as llm:
        kinds = {p.dtype for p in llm.apply_model(lambda model: list(model.parameters()))[0]}
        params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
    assert torch.int8 in kinds
    assert len(output.outputs[0].token_ids) == 3
