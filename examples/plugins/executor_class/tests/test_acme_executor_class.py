from acme_executor_class import AcmeExecutor

from hardpoint.testing import check_executor, engine_here
from hardpoint.types.sampling_params import SamplingParams


def test_it_keeps_the_contract():
    check_executor(AcmeExecutor)


def test_it_measures(caplog):
    with caplog.at_level("INFO"), engine_here(distributed_executor_backend=AcmeExecutor) as llm:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
    assert "acme: the workers took" in caplog.text
