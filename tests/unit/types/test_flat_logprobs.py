"""Flat log-probabilities read like a list of dicts and only grow."""

from __future__ import annotations

import pytest

from hardpoint.types.logprobs import FlatLogprobs, Logprob

POSITIONS = [
    {5: Logprob(-0.5, 1, "a"), 6: Logprob(-1.5, 2, "b")},
    {7: Logprob(-0.25, 1, None)},
    {8: Logprob(-3.0, None, "c"), 9: Logprob(-4.0, 4, "")},
]


@pytest.fixture
def flat() -> FlatLogprobs:
    made = FlatLogprobs()
    made.append(None)
    made.extend(POSITIONS)
    return made


def test_reads_like_the_list_it_was_made_from(flat):
    assert list(flat) == [{}, *POSITIONS]
    assert (len(flat), flat[1], flat[-1]) == (4, POSITIONS[0], POSITIONS[2])
    with pytest.raises(IndexError):
        flat[4]


def test_a_slice_is_a_part_of_its_own(flat):
    part = flat[2:]
    assert isinstance(part, FlatLogprobs)
    assert list(part) == POSITIONS[1:]
    part.append(POSITIONS[0])
    assert (len(part), len(flat)) == (3, 4)
    assert list(flat[::-1]) == [*reversed(POSITIONS), {}]


def test_storage_is_six_flat_lists(flat):
    assert (flat.start_indices, flat.end_indices) == ([0, 0, 2, 3], [0, 2, 3, 5])
    assert (flat.token_ids, flat.ranks) == ([5, 6, 7, 8, 9], [1, 2, 1, None, 4])


def test_the_fast_way_in_gives_the_same():
    fast = FlatLogprobs()
    fast.append_fast([5, 6], [-0.5, -1.5], [1, 2], ["a", "b"])
    assert list(fast) == POSITIONS[:1]


def test_extending_by_itself_doubles(flat):
    flat.extend(flat)
    assert list(flat) == [{}, *POSITIONS, {}, *POSITIONS]


def test_only_grows(flat):
    with pytest.raises(TypeError):
        flat[0] = {}
    with pytest.raises(TypeError):
        del flat[0]
    with pytest.raises(TypeError):
        flat.insert(0, {})
