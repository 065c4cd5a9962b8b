from pathlib import Path

from acme_models import register
from acme_models.model import AcmeForCausalLM

from hardpoint.extensions.registry import registry
from hardpoint.testing import check_model, check_project, engine_here
from hardpoint.types.sampling_params import SamplingParams

PROJECT = Path(__file__).parent.parent


def test_its_entry_point():
    assert check_project(PROJECT) == {"acme_models": register}


def test_it_is_registered(isolated_registries):
    register()
    assert registry("models").load("AcmeForCausalLM") is AcmeForCausalLM


def test_it_keeps_the_contract():
    check_model(AcmeForCausalLM)


def test_it_says_something_else(isolated_registries):
    register()
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    said = []
    for architecture in ("LlamaForCausalLM", "AcmeForCausalLM"):
        with engine_here(hf_overrides={"architectures": [architecture]}) as llm:
            said.append(llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert list(said[0]) != list(said[1])
