from acme_scheduler_cls import AcmeScheduler

from hardpoint.testing import check_scheduler, engine_here
from hardpoint.types.sampling_params import SamplingParams


def test_it_keeps_the_contract():
    check_scheduler(AcmeScheduler)


def test_requests_run_one_after_the_other():
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with engine_here(scheduler_cls="acme_scheduler_cls.AcmeScheduler") as llm:
        engine, ended = llm.llm_engine, []
        for number in range(3):
            engine.add_request(f"r{number}", {"prompt_token_ids": [1, 2, 3]}, params)
        while engine.has_unfinished_requests():
            ended += [output.request_id for output in engine.step() if output.finished]
    assert ended == ["r0", "r1", "r2"]
