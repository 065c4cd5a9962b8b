import numpy as np
import pytest
import torch
from sampling_fakes import CPU, VOCAB, logits_of, metadata, request
from transformers import NoBadWordsLogitsProcessor

from hardpoint.worker.sampling.constraints import (
    LogitBias,
    apply_allowed_ids,
    apply_bad_words,
    apply_grammar,
    apply_min_tokens,
)

FORBIDDEN = float("-inf")


def test_biases_reach_their_row_and_token():
    logits = torch.zeros(3, VOCAB)
    rows = [(0, request(logit_bias={4: 1.5, 5: -2.0})), (2, request(logit_bias={4: 9.0, 10_000: 1.0}))]
    LogitBias(rows, CPU).apply(logits)
    assert logits[0, [4, 5]].tolist() == [1.5, -2.0]
    assert logits[2, 4] == 9.0
    assert logits.count_nonzero() == 3


@pytest.mark.parametrize("output", [[], [8], [7, 8], [7, 8, 9], [9, 7, 8], [1, 2]])
def test_bad_words_are_those_of_transformers(output):
    words = [[5], [8, 9], [7, 8, 3], [6, 6]]
    logits = logits_of(1)
    # Ours looks at the output only: give the reference nothing else to look at.
    seen = torch.tensor([output or [0]])
    expected = NoBadWordsLogitsProcessor(words)(seen, logits.clone())
    apply_bad_words(logits, [(0, request(output=output, bad_words=words))])
    assert torch.equal(logits, expected)


def test_bad_words_do_not_look_at_the_prompt():
    logits = torch.zeros(1, VOCAB)
    apply_bad_words(logits, [(0, request(prompt=[7, 8], bad_words=[[8, 9]]))])
    assert not logits.isinf().any()


@pytest.mark.parametrize("number", [0, 1, 4])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_forbids_every_end_token_for_exactly_so_many_tokens(number, ignore_eos):
    one = request(min_tokens=number, max_tokens=9, stop_token_ids=[11, 12], eos=50, ignore_eos=ignore_eos)
    for length in range(7):
        logits = torch.zeros(1, VOCAB)
        apply_min_tokens(logits, [(0, one)])
        forbidden = logits[0].isinf().nonzero().flatten().tolist()
        assert forbidden == ([11, 12, 50] if length < number else [])
        one.output_token_ids.append(1)


def test_only_allowed_ids_stay():
    logits = logits_of(2)
    before = logits.clone()
    apply_allowed_ids(logits, [(1, request(allowed_token_ids=[3, 9, 3, 5000]))])
    assert torch.equal(logits[0], before[0])
    assert logits[1].isfinite().nonzero().flatten().tolist() == [3, 9]
    assert torch.equal(logits[1, [3, 9]], before[1, [3, 9]])


def test_a_grammar_forbids_what_its_bits_do_not_name():
    allowed = {0, 31, 32, 95, 96}
    mask = np.zeros((1, (VOCAB + 31) // 32), np.int32)
    for token in allowed:
        mask[0, token // 32] |= np.int32(np.uint32(1 << (token % 32)).view(np.int32))
    logits = torch.zeros(2, VOCAB)
    apply_grammar(logits, [1], mask)
    assert set(logits[1].isfinite().nonzero().flatten().tolist()) == allowed
    assert logits[0].isfinite().all()


def test_a_grammar_mask_shorter_than_the_vocabulary_forbids_the_rest():
    logits = torch.zeros(1, VOCAB)
    apply_grammar(logits, [0], np.full((1, 1), -1, np.int32))
    assert logits[0].isfinite().nonzero().flatten().tolist() == list(range(32))


def test_rows_without_a_rule_are_not_listed():
    rows = metadata(request(), request(min_tokens=2, eos=5, max_tokens=4), request(allowed_token_ids=[1]))
    assert [row for row, _ in rows.min_tokens] == [1]
    assert [row for row, _ in rows.allowed] == [2]
    assert rows.no_penalties
    assert rows.constrained
    assert not metadata(request(), request(temperature=0)).constrained
