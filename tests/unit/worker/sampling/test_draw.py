import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_fakes import logits_of, reference_probabilities

from hardpoint.worker.sampling.draw import best_tokens, draw_filtered, draw_tokens, keep_filtered, race_tokens
from hardpoint.worker.sampling.randomness import seeded_streams

DRAWS = 4000


def weights_of(logits: torch.Tensor) -> torch.Tensor:
    return (logits - logits.amax(-1, keepdim=True)).exp()


def frequencies(tokens: torch.Tensor, vocab: int) -> np.ndarray:
    return np.bincount(tokens.numpy(), minlength=vocab) / len(tokens)


def even_uniforms(count: int) -> torch.Tensor:
    """Numbers that cut [0, 1) evenly: each token then comes as often as its probability says."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


@pytest.mark.parametrize("vocab", [5, 97, 600, 3000])
def test_plain_draw_has_the_softmax_frequencies(vocab):
    logits = logits_of(1, vocab)
    tokens = draw_tokens(weights_of(logits).repeat(DRAWS, 1), even_uniforms(DRAWS))
    # A token's numbers form one interval, cut off by less than one draw at each end.
    assert np.abs(frequencies(tokens, vocab) - reference_probabilities(logits[0])).max() < 2 / DRAWS


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 70},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.7},
        {"top_k": 300, "top_p": 0.999, "min_p": 0.001},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize(("vocab", "scale"), [(97, 2.0), (6000, 3.0), (6000, 0.3)])
def test_filtered_draw_has_the_reference_frequencies(filters, vocab, scale):
    logits = logits_of(1, vocab, scale=scale)
    draws = 500
    expected = reference_probabilities(logits[0], **filters)
    tokens = draw_filtered(
        weights_of(logits).repeat(draws, 1),
        torch.full((draws,), filters.get("top_k", vocab)),
        torch.full((draws,), filters.get("top_p", 1.0)),
        torch.full((draws,), filters.get("min_p", 0.0)),
        even_uniforms(draws),
    )
    found = frequencies(tokens, vocab)
    assert not found[expected == 0].any()
    assert np.abs(found - expected).max() < 2 / draws


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.integers(1, 400),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
    uniform=st.floats(0.0, 1.0, exclude_max=True),
)
def test_a_row_does_not_depend_on_its_neighbours(seed, top_k, top_p, min_p, uniform):
    vocab = 400
    rows = weights_of(logits_of(4, vocab, seed))
    ks = torch.tensor([top_k, vocab, 3, 200])
    ps = torch.tensor([top_p, 0.9, 1.0, 0.3])
    ms = torch.tensor([min_p, 0.0, 0.2, 0.0])
    us = torch.tensor([uniform, 0.1, 0.5, 0.9], dtype=torch.float64)
    together = draw_filtered(rows, ks, ps, ms, us)
    alone = draw_filtered(rows[:1], ks[:1], ps[:1], ms[:1], us[:1])
    assert together[0] == alone[0]


def streams_of(count: int) -> torch.Tensor:
    return seeded_streams(np.full(count, 5, np.uint64), np.arange(count))


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 5}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02}], ids=str
)
def test_races_have_the_reference_frequencies(filters):
    vocab = 40
    logits = logits_of(1, vocab)
    weights, streams = weights_of(logits).expand(DRAWS, -1), streams_of(DRAWS)
    expected = reference_probabilities(logits[0], **filters)
    tokens = draw_filtered(
        weights,
        torch.full((DRAWS,), filters.get("top_k", vocab)),
        torch.full((DRAWS,), filters.get("top_p", 1.0)),
        torch.full((DRAWS,), filters.get("min_p", 0.0)),
        streams,
        seeded=True,
    )
    found = frequencies(tokens, vocab)
    assert not found[expected == 0].any()
    # Four standard deviations of a count, and a little for rare tokens.
    assert (np.abs(found - expected) < 4 * np.sqrt(expected / DRAWS) + 2 / DRAWS).all()
    if not filters:
        assert torch.equal(tokens, race_tokens(weights, streams))


@pytest.mark.parametrize("top_p", [1.0, 0.95])
def test_the_last_bits_of_the_logits_do_not_change_a_seeded_draw(top_p):
    rows, vocab = 300, 20_000
    logits = logits_of(rows, vocab, scale=2.0)
    # All at once by a little, as with another batch size; about 1 in 100 draws by cumulative sums would turn.
    moved = logits * (1 + 3e-5)
    off = torch.full((rows,), vocab), torch.full((rows,), top_p), torch.zeros(rows)
    drawn = [draw_filtered(weights_of(some), *off, streams_of(rows), seeded=True) for some in (logits, moved)]
    assert torch.equal(*drawn)


def test_draws_at_the_ends_of_the_unit_interval_are_possible_tokens():
    weights = torch.zeros(3, 2000)
    weights[:, 700] = 0.5
    weights[:, 1999] = 1e-30
    uniforms = torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    assert set(draw_tokens(weights, uniforms).tolist()) <= {700, 1999}


def test_keep_filtered_leaves_what_may_be_drawn():
    logits = logits_of(3, 500)
    filters = [{"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.05, "top_p": 0.9}]
    kept = keep_filtered(
        logits,
        torch.tensor([one.get("top_k", 500) for one in filters]),
        torch.tensor([one.get("top_p", 1.0) for one in filters]),
        torch.tensor([one.get("min_p", 0.0) for one in filters]),
    )
    for row, one in enumerate(filters):
        allowed = reference_probabilities(logits[row], **one) > 0
        assert (kept[row].isfinite().numpy() == allowed).all()
        assert torch.equal(kept[row][allowed], logits[row][allowed])


def test_best_tokens_takes_the_first_of_equals():
    assert best_tokens(torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 5.0]])).tolist() == [1, 0]
