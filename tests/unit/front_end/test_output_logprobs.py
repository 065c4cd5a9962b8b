"""Log-probabilities as users see them."""

from __future__ import annotations

import numpy as np
import pytest

from hardpoint.front_end.output_logprobs import LogprobsCollector
from hardpoint.types.logprobs import FlatLogprobs, Logprob, LogprobsLists
from hardpoint.types.sampling_params import SamplingParams


def rows(*entries: tuple[list[int], list[float], int]) -> LogprobsLists:
    """One entry per position: ids (chosen first), log-probabilities, rank of the chosen."""
    return LogprobsLists(
        np.array([ids for ids, _, _ in entries], np.int32),
        np.array([values for _, values, _ in entries], np.float32),
        np.array([rank for _, _, rank in entries], np.int32),
    )


def collect(tokenizer, given, prompt=(19556,), count=None, **params) -> LogprobsCollector:
    collector = LogprobsCollector(tokenizer, SamplingParams(**params), list(prompt))
    collector.add(given, len(given.sampled_token_ranks) if count is None else count)
    return collector


def test_chosen_and_best_with_ranks_and_texts(smollm2):
    collector = collect(smollm2, rows(([905, 28, 30], [-2.5, -0.5, -1.0], 7)), logprobs=2)
    assert collector.positions == [
        {
            905: Logprob(-2.5, 7, " world"),
            28: Logprob(-0.5, 1, ","),
            30: Logprob(-1.0, 2, "."),
        }
    ]
    assert collector.cumulative == pytest.approx(-2.5)


def test_a_chosen_token_among_the_best_is_listed_once(smollm2):
    collector = collect(smollm2, rows(([28, 28, 30], [-0.5, -0.5, -1.0], 1)), logprobs=2)
    assert collector.positions == [{28: Logprob(-0.5, 1, ","), 30: Logprob(-1.0, 2, ".")}]


def test_columns_another_request_asked_for_are_left_out(smollm2):
    wide = rows(([905, 28, 30, 33], [-2.5, -0.5, -1.0, -3.0], 7))
    assert list(collect(smollm2, wide, logprobs=1).positions[0]) == [905, 28]
    assert list(collect(smollm2, wide, logprobs=0).positions[0]) == [905]
    assert list(collect(smollm2, wide, logprobs=-1).positions[0]) == [905, 28, 30, 33]


def test_tokens_that_do_not_count_are_left_out(smollm2):
    two = rows(([905], [-1.0], 1), ([28], [-9.0], 4))
    collector = collect(smollm2, two, count=1, logprobs=0)
    assert len(collector.positions) == 1
    assert collector.cumulative == pytest.approx(-1.0)


def test_texts_of_chosen_tokens_join_to_the_text(smollm2):
    ids = smollm2.encode(" caf\u00e9 \U0001f600\U0001f468\u200d\U0001f469 end")
    collector = collect(smollm2, rows(*(([token], [-1.0], 1) for token in ids)), logprobs=0)
    texts = [position[token].decoded_token for position, token in zip(collector.positions, ids, strict=True)]
    assert "".join(texts) == smollm2.decode(ids)
    assert "\ufffd" not in "".join(texts)
    assert "" in texts  # the first bytes of an emoji add nothing yet


def test_candidates_are_read_after_the_same_text(smollm2):
    smile = smollm2.encode("\U0001f600")
    collector = collect(smollm2, rows(*(([token, 905], [-1.0, -2.0], 1) for token in smile)), logprobs=1)
    # " world" after half a character would leave that half broken.
    assert collector.positions[-1][905].decoded_token == "\ufffd world"
    assert collector.positions[0][905].decoded_token == " world"


def test_prompt_positions_begin_with_none(smollm2):
    prompt = smollm2.encode("Hello world,")
    collector = LogprobsCollector(smollm2, SamplingParams(prompt_logprobs=1), prompt)
    collector.add_prompt(rows(([prompt[1], 30], [-3.0, -1.0], 9)))
    collector.add_prompt(rows(([prompt[2], 30], [-0.25, -4.0], 1)))
    assert collector.prompt_positions == [
        None,
        {prompt[1]: Logprob(-3.0, 9, " world"), 30: Logprob(-1.0, 1, ".")},
        {prompt[2]: Logprob(-0.25, 1, ","), 30: Logprob(-4.0, 1, ".")},
    ]
    assert collector.positions is None


def test_flat_storage_holds_the_same(smollm2):
    given = rows(([28, 28, 30], [-0.5, -0.5, -1.0], 1), ([905, 28, 30], [-2.5, -0.5, -1.0], 7))
    flat = collect(smollm2, given, logprobs=2, flat_logprobs=True).positions
    assert isinstance(flat, FlatLogprobs)
    assert list(flat) == collect(smollm2, given, logprobs=2).positions


def test_asked_ids_have_no_rank(smollm2):
    collector = collect(smollm2, rows(([905, 28, 30], [-2.5, -0.5, -1.0], 7)), logprob_token_ids=[28, 30])
    assert [entry.rank for entry in collector.positions[0].values()] == [7, None, None]


def test_without_text_there_is_no_text(smollm2):
    given = rows(([905, 28], [-2.5, -0.5], 7))
    for tokenizer, detokenize in ((None, True), (smollm2, False)):
        position = collect(tokenizer, given, logprobs=1, detokenize=detokenize).positions[0]
        assert [entry.decoded_token for entry in position.values()] == [None, None]


def test_nothing_is_gathered_unless_asked_for(smollm2):
    collector = collect(smollm2, rows(([905], [-1.0], 1)))
    assert (collector.positions, collector.prompt_positions, collector.cumulative) == (None, None, None)
