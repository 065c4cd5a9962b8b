from acme_worker_cls import AcmeWorker

from hardpoint.testing import check_worker, engine_here
from hardpoint.types.sampling_params import SamplingParams


def test_it_keeps_the_contract():
    check_worker(AcmeWorker)


def test_it_counts_steps():
    with engine_here(worker_cls="acme_worker_cls.AcmeWorker") as llm:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
        assert llm.collective_rpc("acme_steps")[0] >= 4
