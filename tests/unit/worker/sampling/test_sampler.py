import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_fakes import VOCAB, logits_of, metadata, reference_probabilities, request

from hardpoint.types.sampling_params import SamplingParams
from hardpoint.types.schedule import NO_TOKEN_LEFT
from hardpoint.worker.sampling.sampler import Sampler

GREEDY = {"temperature": 0.0}


def sample(logits, *requests, mode="raw_logprobs", sampler=None):
    return (sampler or Sampler(mode))(logits.clone(), metadata(*requests))


def test_greedy_rows_take_the_best_token():
    logits = logits_of(5)
    output = sample(logits, *(request(**GREEDY) for _ in range(5)))
    assert output.sampled_token_ids.tolist() == logits.argmax(-1, keepdim=True).tolist()
    assert output.logprobs_tensors is None
    assert not output.faults


def test_greedy_and_random_rows_share_a_batch():
    logits = logits_of(4)
    rows = [request(**GREEDY), request(top_k=3), request(**GREEDY), request(temperature=0.5)]
    for _ in range(30):
        tokens = sample(logits, *rows).sampled_token_ids.flatten().tolist()
        assert tokens[0] == logits[0].argmax()
        assert tokens[2] == logits[2].argmax()
        assert tokens[1] in logits[1].topk(3).indices.tolist()


@settings(max_examples=40, deadline=None)
@given(
    st.builds(
        dict,
        temperature=st.floats(0.05, 3.0),
        top_k=st.integers(0, VOCAB),
        top_p=st.floats(0.05, 1.0),
        min_p=st.floats(0.0, 0.6),
    ),
    st.integers(0, 100),
)
def test_random_rows_draw_within_their_filters(params, seed):
    logits = logits_of(1, seed=seed)
    expected = reference_probabilities(logits[0], **params)
    for draw in range(20):
        token = sample(logits, request(seed=draw, **params)).sampled_token_ids.item()
        # A token that rounding puts on the other side of the border is as good.
        assert expected[token] > 0 or abs(np.partition(expected[expected > 0], 0)[0]) < 1e-3


def test_random_rows_have_the_frequencies_of_their_temperature():
    logits = logits_of(1, vocab=8)
    tokens = [
        sample(logits, request(seed=seed, temperature=0.7, vocab=8)).sampled_token_ids.item() for seed in range(3000)
    ]
    expected = reference_probabilities(logits[0], temperature=0.7) * 3000
    found = np.bincount(tokens, minlength=8)
    # Chi-square with 7 degrees of freedom.
    assert ((found - expected) ** 2 / expected).sum() < 30


def test_a_seeded_request_draws_the_same_alone_and_in_any_batch():
    generator = np.random.default_rng(0)
    logits = logits_of(12, seed=3)
    rows = [request(output=range(i), seed=i % 4, temperature=1.3, top_p=[1.0, 0.9][i % 2]) for i in range(12)]
    alone = [sample(logits[i : i + 1], rows[i]).sampled_token_ids.item() for i in range(12)]
    sampler = Sampler()
    for _ in range(10):
        order = generator.permutation(12)[: generator.integers(1, 13)]
        others = [request(**GREEDY), request(temperature=2.0)]
        batch = torch.cat([logits[order], logits_of(2)])
        tokens = sample(batch, *(rows[i] for i in order), *others, sampler=sampler).sampled_token_ids.flatten()
        assert tokens[:-2].tolist() == [alone[i] for i in order]


def test_seeded_draws_differ_by_seed_and_by_position():
    logits = torch.zeros(40, VOCAB)
    by_seed = sample(logits, *(request(seed=seed) for seed in range(40))).sampled_token_ids.flatten().tolist()
    by_place = sample(logits, *(request(seed=1, output=[0] * n) for n in range(40))).sampled_token_ids.flatten()
    assert len(set(by_seed)) > 20
    assert len(set(by_place.tolist())) > 20


def test_unseeded_draws_follow_the_engine_seed_and_other_kinds_do_not_use_it_up():
    logits = logits_of(3)

    def run(seed, *, with_others):
        sampler = Sampler(seed=seed)
        tokens = []
        for _ in range(20):
            rows = [request(temperature=1.5)]
            rows += [request(**GREEDY), request(seed=4)] if with_others else []
            tokens.append(sample(logits[: len(rows)], *rows, sampler=sampler).sampled_token_ids[0].item())
        return tokens

    assert run(5, with_others=False) == run(5, with_others=True)
    assert run(5, with_others=False) != run(6, with_others=False)


def test_rules_apply_before_the_choice():
    logits = torch.zeros(4, VOCAB)
    logits[:, 7] = 5.0
    output = sample(
        logits,
        request(logit_bias={9: 100.0}, **GREEDY),
        request(output=[7], presence_penalty=2.0, frequency_penalty=2.0, logit_bias={8: 2.0}, **GREEDY),
        request(allowed_token_ids=[3], **GREEDY),
        request(eos=9, logit_bias={9: 100.0}, min_tokens=1, **GREEDY),
    )
    # Row 3: the bias favours the end token, min_tokens has the last word.
    assert output.sampled_token_ids.flatten().tolist() == [9, 8, 3, 7]


def test_min_tokens_lets_the_end_come_as_the_next_token():
    one = request(eos=9, logit_bias={9: 100.0}, min_tokens=3, max_tokens=9, **GREEDY)
    rows = metadata(one)
    sampler = Sampler()
    tokens = []
    for _ in range(5):
        token = sampler(logits_of(1), rows).sampled_token_ids.item()
        one.output_token_ids.append(token)
        tokens.append(token)
    assert 9 not in tokens[:3]
    assert tokens[3] == 9


@pytest.mark.parametrize("params", [GREEDY, {"seed": 1}, {"seed": 1, "top_p": 0.9}, {"seed": 1, "top_k": 4}])
def test_a_row_with_nan_ends_alone(params):
    logits = logits_of(3)
    clean = sample(logits, *(request(**params) for _ in range(3))).sampled_token_ids
    logits[1, 5] = float("nan")
    output = sample(logits, *(request(**params) for _ in range(3)))
    assert list(output.faults) == [1]
    assert "NaN" in output.faults[1]
    assert output.sampled_token_ids[[0, 2]].tolist() == clean[[0, 2]].tolist()


def test_a_row_with_no_token_left_ends_alone():
    logits = logits_of(2)
    logits[0, 4] = float("-inf")
    output = sample(logits, request(allowed_token_ids=[4], seed=1), request(**GREEDY))
    assert list(output.faults) == [0]
    assert output.faults[0] == NO_TOKEN_LEFT


def test_an_infinite_logit_is_a_certain_token():
    logits = logits_of(2)
    logits[:, 8] = float("inf")
    assert sample(logits, request(seed=3), request(**GREEDY)).sampled_token_ids.flatten().tolist() == [8, 8]


def test_warm_up_parameters_pass_through_every_path():
    params = SamplingParams.for_sampler_warmup()
    fields = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "logprobs")
    one = request(**{name: getattr(params, name) for name in fields})
    output = sample(logits_of(1), one)
    assert not output.faults
    assert output.logprobs_tensors.logprobs.shape == (1, 6)


def log_softmax(row):
    row = row.astype(np.float64)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


def test_raw_logprobs_are_those_of_the_untouched_logits():
    logits = logits_of(3)
    output = sample(logits, request(logprobs=4, logit_bias={1: 50.0}, seed=1), request(**GREEDY), request(logprobs=0))
    found = output.logprobs_tensors.tolists()
    reference = log_softmax(logits[0].numpy())
    best = np.argsort(-reference)[:4]
    assert found.logprob_token_ids[0].tolist() == [1, *best]
    np.testing.assert_allclose(found.logprobs[0], reference[[1, *best]], atol=1e-5)
    assert found.sampled_token_ranks[0] == 1 + (reference > reference[1]).sum()
    chosen = output.sampled_token_ids[2].item()
    assert found.logprob_token_ids[2, 0] == chosen
    np.testing.assert_allclose(found.logprobs[2, 0], log_softmax(logits[2].numpy())[chosen], atol=1e-5)
    # Nobody asked for row 1.
    assert not found.logprobs[1].any()


def test_raw_logits_mode_reports_logits():
    logits = logits_of(1)
    found = sample(logits, request(logprobs=2, temperature=0.3), mode="raw_logits").logprobs_tensors.tolists()
    np.testing.assert_array_equal(found.logprobs[0], logits[0, found.logprob_token_ids[0]].numpy())


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
def test_processed_modes_report_what_the_choice_was_made_from(mode):
    logits = logits_of(2)
    params = {"temperature": 0.5, "top_k": 3}
    output = sample(
        logits, request(logprobs=5, **params), request(logprobs=1, logit_bias={4: 30.0}, **GREEDY), mode=mode
    )
    found = output.logprobs_tensors.tolists()
    scaled = logits[0].numpy() / 0.5
    keep = np.argsort(-scaled)[:3]
    kept = np.full(VOCAB, -np.inf)
    kept[keep] = scaled[keep]
    expected = kept if mode.endswith("logits") else log_softmax(kept)
    np.testing.assert_allclose(found.logprobs[0, 1:4], expected[keep], atol=1e-5)
    assert np.isneginf(found.logprobs[0, 4:]).all()
    biased = logits[1].numpy().copy()
    biased[4] += 30.0
    reference = biased if mode.endswith("logits") else log_softmax(biased)
    np.testing.assert_allclose(found.logprobs[1, 0], reference[4], atol=1e-5)


def test_the_whole_vocabulary_can_be_reported():
    logits = logits_of(1)
    found = sample(logits, request(logprobs=-1, **GREEDY)).logprobs_tensors.tolists()
    assert found.logprobs.shape == (1, VOCAB + 1)
    assert sorted(found.logprob_token_ids[0, 1:].tolist()) == list(range(VOCAB))


def test_given_ids_are_reported_instead_of_the_best():
    logits = logits_of(2)
    output = sample(logits, request(logprob_token_ids=[60, 2], **GREEDY), request(logprobs=3, **GREEDY))
    found = output.logprobs_tensors.tolists()
    assert found.logprob_token_ids[0, :3].tolist() == [logits[0].argmax(), 60, 2]
    np.testing.assert_allclose(
        found.logprobs[0, :3], log_softmax(logits[0].numpy())[[logits[0].argmax(), 60, 2]], atol=1e-5
    )
    assert found.logprob_token_ids[1, 1:].tolist() == logits[1].topk(3).indices.tolist()


def test_half_precision_logits_are_scored_in_float32():
    logits = logits_of(1).to(torch.bfloat16)
    found = sample(logits, request(logprobs=1, **GREEDY)).logprobs_tensors.tolists()
    np.testing.assert_allclose(found.logprobs[0, 0], log_softmax(logits[0].float().numpy()).max(), atol=1e-6)
