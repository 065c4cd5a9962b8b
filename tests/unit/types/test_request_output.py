"""Merging of request outputs."""

from __future__ import annotations

import logging

from hardpoint.types.logprobs import FlatLogprobs, Logprob
from hardpoint.types.outputs import CompletionOutput, RequestOutput


def output(*completions: CompletionOutput, finished: bool = False, **more) -> RequestOutput:
    return RequestOutput("r", "p", [1], None, list(completions), finished, **more)


def test_deltas_are_appended_with_their_logprobs():
    first = output(CompletionOutput(0, "a", [1], -1.0, [{1: Logprob(-1.0)}]))
    first.add(
        output(CompletionOutput(0, "b", [2], -3.0, [{2: Logprob(-2.0)}], finish_reason="stop", stop_reason="x")), True
    )
    (joined,) = first.outputs
    assert (joined.text, joined.token_ids, joined.cumulative_logprob) == ("ab", [1, 2], -3.0)
    assert joined.logprobs == [{1: Logprob(-1.0)}, {2: Logprob(-2.0)}]
    assert (joined.finish_reason, joined.stop_reason, joined.finished()) == ("stop", "x", True)


def test_flat_logprobs_are_appended_too():
    one, two = FlatLogprobs(), FlatLogprobs()
    one.append({1: Logprob(-1.0)})
    two.append({2: Logprob(-2.0)})
    first = output(CompletionOutput(0, "a", [1], -1.0, one))
    first.add(output(CompletionOutput(0, "b", [2], -3.0, two)), True)
    assert list(first.outputs[0].logprobs) == [{1: Logprob(-1.0)}, {2: Logprob(-2.0)}]


def test_whole_outputs_replace_and_new_indices_join():
    first = output(CompletionOutput(0, "a", [1], None, None))
    first.add(output(CompletionOutput(0, "ab", [1, 2], None, None), CompletionOutput(1, "x", [9], None, None)), False)
    assert [one.text for one in first.outputs] == ["ab", "x"]


def test_later_facts_are_kept():
    first = output(num_cached_tokens=None)
    first.add(output(finished=True, num_cached_tokens=4, kv_transfer_params={"a": 1}), True)
    first.add(output(), True)
    assert (first.finished, first.num_cached_tokens, first.kv_transfer_params) == (True, 4, {"a": 1})


def test_unknown_arguments_are_ignored_with_a_warning(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hardpoint"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="hardpoint"):
        assert output(from_the_future=1).request_id == "r"
    assert "from_the_future" in caplog.text
