"""An output's text: equal to the plain text cut at the first stop string, for any tokens and stops."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.front_end.output_text import OutputText
from hardpoint.types.sampling_params import SamplingParams

PROMPT = [19556]


def run(tokenizer, ids, steps, **params):
    """Feed ids in steps as the engine would; return visible texts after each, the output and the match."""
    output = OutputText(tokenizer, SamplingParams(**params), PROMPT)
    seen, at = [], 0
    stop = None
    for step in steps:
        stop = output.add(ids[at : at + step])
        at += step
        seen.append(output.text[: output.visible])
        if stop is not None:
            return seen, output, stop
    stop = output.end()
    seen.append(output.text[: output.visible])
    return seen, output, stop


def expected(text: str, stops: list[str], include: bool) -> str:
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[:end] if include else text[: end - max(map(len, complete))]
    return text


@given(data=st.data(), include=st.booleans())
@settings(max_examples=300, deadline=None)
def test_joined_stream_is_the_text_cut_at_the_first_match(smollm2, data, include):
    text = data.draw(st.text("ab c\u00e9\u65e5\U0001f600.", min_size=1, max_size=40))
    ids = smollm2.encode(text)
    whole, _, _ = run(smollm2, ids, [len(ids)])
    text = whole[-1]
    fragments = st.builds(lambda at, n: text[at : at + n], st.integers(0, len(text) - 1), st.integers(1, 8))
    stops = data.draw(st.lists(fragments | st.text("ab\u00e9\u65e5", min_size=1, max_size=4), min_size=1, max_size=4))
    steps = data.draw(st.lists(st.integers(1, 3), min_size=len(ids), max_size=len(ids)))
    seen, output, stop = run(smollm2, ids, steps, stop=stops, include_stop_str_in_output=include)
    wanted = expected(text, stops, include)
    assert output.text == wanted
    assert (stop is not None) == any(s in text for s in stops)
    # What was shown is never taken back, so deltas join to the text.
    for earlier, later in pairwise(seen):
        assert later.startswith(earlier)
    assert seen[-1] == wanted


def test_text_is_held_back_only_while_it_may_become_a_stop_string(smollm2):
    output = OutputText(smollm2, SamplingParams(stop=["STOP NOW"]), PROMPT)
    for token in smollm2.encode("Hello there. STOP"):
        output.add([token])
    assert output.text[: output.visible] == "Hello there. "
    assert output.waits
    for token in smollm2.encode(" later"):
        output.add([token])
    assert output.text[: output.visible] == "Hello there. STOP later"
    assert not output.waits


def test_nothing_is_held_back_when_the_stop_string_is_shown_anyway(smollm2):
    output = OutputText(smollm2, SamplingParams(stop=["STOP NOW"], include_stop_str_in_output=True), PROMPT)
    output.add(smollm2.encode("Go. STOP"))
    assert output.text[: output.visible] == "Go. STOP"


def test_tokens_after_the_match_in_the_same_step_are_dropped(smollm2):
    ids = smollm2.encode("one two three four")
    output = OutputText(smollm2, SamplingParams(stop=["two"]), PROMPT)
    assert output.add(ids) == "two"
    assert output.text == "one "
    assert output.token_ids == ids[:2]


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3, 4, 5])
def test_stop_strings_wait_for_min_tokens(smollm2, min_tokens):
    ids = smollm2.encode(" a a a a a a")
    output = OutputText(smollm2, SamplingParams(stop=["a"], min_tokens=min_tokens), PROMPT)
    assert output.add(ids) == "a"
    assert len(output.token_ids) == min_tokens + 1
    assert output.text == " a" * min_tokens + " "


def test_an_end_token_is_counted_and_not_shown(smollm2):
    newline = smollm2.encode("\n")[0]
    output = OutputText(smollm2, SamplingParams(stop_token_ids=[newline]), PROMPT)
    output.add([*smollm2.encode("line"), newline], hide_last=True)
    output.end()
    assert output.text == "line"
    assert output.token_ids[-1] == newline


def test_held_back_bytes_come_out_at_the_end(smollm2):
    ids = smollm2.encode("\U0001f600")[:-1]
    seen, output, _ = run(smollm2, ids, [1] * len(ids))
    assert seen == ["", "", "\ufffd"][-len(seen) :]
    assert output.text == "\ufffd"


def test_without_tokenizer_or_detokenize_there_is_no_text(smollm2):
    for tokenizer, detokenize in ((None, True), (smollm2, False)):
        output = OutputText(tokenizer, SamplingParams(detokenize=detokenize), PROMPT)
        output.add([1, 2, 3])
        output.end()
        assert (output.text, output.token_ids, output.waits) == ("", [1, 2, 3], False)


def test_special_tokens_are_shown_on_request(smollm2):
    ids = [*smollm2.encode("a"), 2, *smollm2.encode("b")]
    hidden, _, _ = run(smollm2, ids, [3])
    shown, _, _ = run(smollm2, ids, [3], skip_special_tokens=False)
    assert (hidden[-1], shown[-1]) == ("ab", "a<|im_end|>b")
