import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_fakes import VOCAB, logits_of, request
from transformers import RepetitionPenaltyLogitsProcessor

from hardpoint.worker.sampling.penalties import TokenCounts, apply_penalties

TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=60)


@settings(max_examples=50, deadline=None)
@given(prompt=TOKENS.filter(bool), output=TOKENS, penalty=st.floats(0.3, 3.0))
def test_repetition_penalty_is_that_of_transformers(prompt, output, penalty):
    logits = logits_of(1)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits.clone())
    apply_penalties(logits, [(0, request(prompt, output, repetition_penalty=penalty))])
    torch.testing.assert_close(logits, expected)


@settings(max_examples=50, deadline=None)
@given(prompt=TOKENS, output=TOKENS, frequency=st.floats(-2, 2), presence=st.floats(-2, 2))
def test_frequency_and_presence_count_the_output_only(prompt, output, frequency, presence):
    logits = logits_of(1)
    expected = logits.clone()
    for token in set(output):
        expected[0, token] -= frequency * output.count(token) + presence
    apply_penalties(logits, [(0, request(prompt, output, frequency_penalty=frequency, presence_penalty=presence))])
    torch.testing.assert_close(logits, expected)


def test_rows_keep_their_own_penalties():
    logits = logits_of(3)
    expected = logits.clone()
    expected[0, 5] -= 1.0
    expected[2, 6] = expected[2, 6] / 2 if expected[2, 6] > 0 else expected[2, 6] * 2
    rows = [(0, request([1], [5], presence_penalty=1.0)), (2, request([6], [], repetition_penalty=2.0))]
    apply_penalties(logits, rows)
    torch.testing.assert_close(logits, expected)


def test_counts_follow_a_growing_output():
    output: list[int] = []
    counts = TokenCounts([4, 4, 900], vocab_size=100)
    for token in [4, 7, 7, *range(10, 60)]:
        output.append(token)
        counts.follow(output)
    found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert found[4] == 1
    assert found[7] == 2
    assert found[59] == 1
    assert 900 not in found


def test_an_output_that_was_cut_back_is_counted_anew():
    one = request([1], [5, 5, 6], frequency_penalty=1.0)
    one.counts()
    one.output_token_ids[:] = [5, 9, 9]
    one.output_was_cut()
    logits = torch.zeros(1, VOCAB)
    apply_penalties(logits, [(0, one)])
    assert logits[0, [5, 6, 9]].tolist() == [-1.0, 0.0, -2.0]


def test_a_penalty_without_tokens_changes_nothing():
    logits = logits_of(1)
    expected = logits.clone()
    apply_penalties(logits, [(0, request([1], [], presence_penalty=1.0))])
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("value", [float("-inf"), 0.0])
def test_forbidden_tokens_stay_forbidden(value):
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = value
    apply_penalties(logits, [(0, request([3], [], repetition_penalty=0.5))])
    assert logits[0, 3] == value
