import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_fakes import MAX_LEN, POISON, VOCAB, Driver, Job, greedy, logits_after, make_runner

from hardpoint.types.sampling_params import SamplingParams
from hardpoint.types.schedule import GrammarOutput, NewRequestData, SchedulerOutput


@pytest.fixture
def runner(monkeypatch):
    return make_runner(monkeypatch)


def jobs(count=10):
    """Requests of every kind, each with an answer of its own when run alone."""
    kinds = [
        {"temperature": 0.0},
        {"seed": 5, "temperature": 1.5},
        {"seed": 5, "top_p": 0.8, "top_k": 30},
        {"temperature": 0.0, "repetition_penalty": 1.4, "presence_penalty": 0.5},
        {"temperature": 0.0, "allowed_token_ids": list(range(10, 20))},
        {"temperature": 0.0, "allowed_token_ids": list(range(20, 30))},
        {"seed": 9, "frequency_penalty": 1.0, "min_p": 0.01},
        {"temperature": 0.0, "logit_bias": {3: 40.0}, "min_tokens": 4, "stop_token_ids": [3]},
        {"temperature": 0.0, "logprobs": 3},
        {"seed": 2, "logprobs": 0, "min_tokens": 2, "stop_token_ids": [1, 2]},
    ]
    return [
        Job(f"job{i}", [(i * 7 + k) % 80 for k in range(1 + 5 * i)], SamplingParams(max_tokens=3 + 2 * i, **kinds[i]))
        for i in range(count)
    ]


def answers(done):
    return {job.req_id: (job.output, job.error, job.logprobs) for job in done}


@pytest.fixture(scope="module")
def solo():
    with pytest.MonkeyPatch.context() as patch:
        runner = make_runner(patch)
        done = [Driver(runner, chunk=1000, unrest=0).run(job)[0] for job in jobs()]
    return answers(done)


def test_greedy_output_is_the_best_token_of_each_step(runner):
    (job,) = Driver(runner, chunk=1000, unrest=0).run(Job("a", [5, 6], greedy(max_tokens=8)))
    tokens = [5, 6]
    for _ in range(8):
        tokens.append(int(logits_after(tokens).argmax()))
    assert job.output == tokens[2:]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 6), st.integers(1, 30))
def test_whatever_the_schedule_each_request_gets_its_solo_answer(solo, seed, slots, chunk):
    with pytest.MonkeyPatch.context() as patch:
        runner = make_runner(patch, max_num_seqs=slots)
        done = Driver(runner, seed, slots, chunk).run(*jobs())
    assert answers(done) == solo


def test_cancelled_requests_do_not_disturb_the_others(runner, solo):
    work = jobs()
    work[3].cancel_after, work[6].cancel_after = 2, 1
    done = Driver(runner, 3, slots=8).run(*work)
    for req_id, answer in answers(done).items():
        if req_id not in ("job3", "job6"):
            assert answer == solo[req_id]
    assert not runner.requests.states


def test_logprobs_belong_to_their_token(runner):
    (job,) = Driver(runner, 1).run(Job("a", [4, 9], SamplingParams(seed=1, logprobs=2, max_tokens=6)))
    for place, (ids, values) in enumerate(job.logprobs):
        logits = logits_after([4, 9, *job.output[:place]]).astype(np.float64)
        reference = logits - np.log(np.exp(logits).sum())
        assert ids == [job.output[place], *(token for token in np.argsort(-reference)[:2])]
        np.testing.assert_allclose(values, reference[ids], atol=1e-5)


@pytest.mark.parametrize("unrest", [0.0, 0.3])
@pytest.mark.parametrize("length", [1, 2, 70, 150])
def test_prompt_logprobs_are_whole_whatever_the_chunks(runner, unrest, length):
    prompt = [(3 * k) % 80 for k in range(length)]
    (job, _) = Driver(runner, 7, chunk=40, unrest=unrest).run(
        Job("a", prompt, greedy(prompt_logprobs=2, max_tokens=3)), Job("b", [1] * 30, greedy(max_tokens=30))
    )
    found = job.prompt_logprobs
    assert found.logprobs.shape == (length - 1, 3)
    for row in range(length - 1):
        logits = logits_after(prompt[: row + 1]).astype(np.float64)
        reference = logits - np.log(np.exp(logits).sum())
        target = prompt[row + 1]
        assert found.logprob_token_ids[row, 0] == target
        np.testing.assert_allclose(found.logprobs[row], reference[found.logprob_token_ids[row]], atol=1e-5)
        assert found.logprob_token_ids[row, 1] == logits.argmax()
        assert found.sampled_token_ranks[row] == 1 + (reference > reference[target]).sum()


def test_prompt_logprobs_come_once_and_only_when_complete(runner):
    driver = Driver(runner, unrest=0, chunk=4)
    driver.run(Job("a", list(range(30)), greedy(prompt_logprobs=0, max_tokens=4)))
    seen = [output.prompt_logprobs_dict.get("a") for output in driver.outputs]
    assert [part is not None for part in seen].count(True) == 1
    assert [bool(output.sampled_token_ids[0]) for output in driver.outputs].index(True) == seen.index(
        next(part for part in seen if part is not None)
    )


def test_a_request_with_nan_logits_ends_alone(runner, solo):
    work = jobs()
    bad = Job("bad", [1, POISON], greedy(max_tokens=5))
    done = Driver(runner, 2).run(*work, bad)
    assert "NaN" in bad.error
    assert bad.output == []
    assert answers(done[:-1]) == solo


def test_nans_are_counted_on_request(monkeypatch):
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    driver = Driver(make_runner(monkeypatch), unrest=0, chunk=100)
    driver.run(Job("good", [1], greedy(max_tokens=1)), Job("bad", [POISON], greedy(max_tokens=1)))
    assert driver.outputs[0].num_nans_in_logits == {"good": 0, "bad": VOCAB}


def test_nans_are_not_counted_unless_asked(runner):
    driver = Driver(runner)
    driver.run(Job("a", [1], greedy(max_tokens=1)))
    assert driver.outputs[0].num_nans_in_logits is None


def test_parameters_that_cannot_be_used_end_their_request_only(runner, solo):
    bad = Job("bad", [1, 2], greedy(max_tokens=3))
    bad.params.logit_bias = {"x": 1.0}
    work = jobs(4)
    Driver(runner, 4).run(*work, bad)
    assert "sampling parameters" in bad.error
    assert answers(work) == {job.req_id: solo[job.req_id] for job in work}


def one_step(req_id="a", prompt=(1, 2), params=None, structured=False):
    plan = SchedulerOutput.make_empty()
    plan.scheduled_new_reqs = [NewRequestData(req_id, list(prompt), [], params or greedy(), None, (), 0, None)]
    plan.num_scheduled_tokens = {req_id: len(prompt)}
    plan.total_num_scheduled_tokens = len(prompt)
    plan.has_structured_output_requests = structured
    return plan


def test_a_step_with_a_grammar_waits_for_its_mask(runner):
    assert runner.execute_model(one_step(structured=True)) is None
    mask = np.zeros((2, (VOCAB + 31) // 32), np.int32)
    mask[1, 42 // 32] = 1 << (42 % 32)
    output = runner.sample_tokens(GrammarOutput(["somebody else", "a"], mask))
    assert output.sampled_token_ids == [[42]]
    assert runner.sample_tokens(None).req_ids == []


def test_an_empty_step_gives_an_empty_answer(runner):
    output = runner.execute_model(SchedulerOutput.make_empty())
    assert output.req_ids == []
    assert output.sampled_token_ids == []


def test_sampling_is_a_patchable_seam(runner, monkeypatch):
    from hardpoint.worker.sampling.sampler import Sampler

    original = Sampler.forward

    def forward(self, logits, sampling_metadata):
        logits[:, 33] = 1e4
        return original(self, logits, sampling_metadata)

    monkeypatch.setattr(Sampler, "forward", forward)
    assert runner.execute_model(one_step()).sampled_token_ids == [[33]]


def test_warm_up_leaves_nothing_behind(runner):
    before = runner.execute_model(one_step(params=SamplingParams(temperature=3.0))).sampled_token_ids
    runner.warm_up()
    assert set(runner.requests.states) == {"a"}
    fresh = runner.requests.states["a"]
    assert [list(fresh.output)] == before


def test_decode_metadata_is_reused_while_the_rows_stay(runner, monkeypatch):
    built = []
    from hardpoint.worker import runner as module

    original = module.build_metadata
    monkeypatch.setattr(module, "build_metadata", lambda *args: built.append(1) or original(*args))
    work = [Job(f"a{i}", [i + 1], greedy(max_tokens=20)) for i in range(4)]
    Driver(runner, unrest=0, chunk=10).run(*work)
    assert len(built) == 1


def test_a_request_may_fill_the_context(runner):
    (job,) = Driver(runner, unrest=0, chunk=1000).run(Job("a", [1] * (MAX_LEN - 5), greedy(max_tokens=5)))
    assert len(job.output) == 5


def test_the_context_length_can_only_shrink(runner):
    runner.update_max_model_len(MAX_LEN - 10)
    with pytest.raises(ValueError, match="exceeds"):
        runner.update_max_model_len(MAX_LEN)


def test_without_attention_there_is_no_cache_to_describe(runner):
    assert runner.get_kv_cache_spec() == {}
    assert runner.get_supported_tasks() == ("generate",)
    assert isinstance(runner.get_model(), torch.nn.Module)


def decode_step(*known, finished=(), new=None):
    """A step with one token of each (request id, tokens computed, output tokens) and perhaps a new request."""
    plan = new or SchedulerOutput.make_empty()
    cached = plan.scheduled_cached_reqs
    for req_id, computed, number in known:
        cached.req_ids.append(req_id)
        cached.new_block_ids.append(None)
        cached.num_computed_tokens.append(computed)
        cached.num_output_tokens.append(number)
        plan.num_scheduled_tokens[req_id] = 1
    plan.total_num_scheduled_tokens = sum(plan.num_scheduled_tokens.values())
    plan.finished_req_ids = set(finished)
    return plan


def test_an_output_that_is_cut_back_is_held_to_its_minimum_again(runner):
    params = greedy(min_tokens=2, max_tokens=9, stop_token_ids=[50], logit_bias={50: 100.0})
    tokens = [
        runner.execute_model(plan).sampled_token_ids[0][0]
        for plan in (
            one_step("a", params=params),
            decode_step(("a", 2, 1)),
            decode_step(("a", 3, 2), new=one_step("b")),
            decode_step(("a", 4, 3), finished=["b"]),
            # The scheduler takes all but the first token back.
            decode_step(("a", 2, 1)),
            decode_step(("a", 3, 2)),
        )
    ]
    assert [token == 50 for token in tokens] == [False, False, True, True, False, True]
