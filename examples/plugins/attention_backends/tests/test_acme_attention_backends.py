from pathlib import Path

from acme_attention_backends import register
from acme_attention_backends.backend import AcmeBackend

from hardpoint.testing import check_attention_backend, check_project, engine_here
from hardpoint.types.sampling_params import SamplingParams
from hardpoint.worker.attention.registry import AttentionBackendEnum

PROJECT = Path(__file__).parent.parent


def test_its_entry_point():
    assert check_project(PROJECT) == {"acme_attention_backends": register}


def test_it_keeps_the_contract():
    check_attention_backend(AcmeBackend)


def test_a_model_answers_the_same_with_it(isolated_registries):
    register()
    register()
    assert AttentionBackendEnum["ACME_ATTN"].get_class() is AcmeBackend
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": [1, 2, 3] * 20}, {"prompt_token_ids": [7]}]
    said = []
    for backend in (None, "ACME_ATTN"):
        with engine_here(attention_backend=backend) as llm:
            said.append([list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)])
    assert said[0] == said[1]
