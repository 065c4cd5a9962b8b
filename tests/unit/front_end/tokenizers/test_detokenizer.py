"""Streams of tokens become text without halves of characters and equal to decoding the whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.front_end.tokenizers import detokenizer_for

KINDS = ["smollm2", "sentencepiece", "wordpieces"]
# What SmolLM2's vocabulary can write: planes 4 to 15 and a few control characters have no tokens.
TEXT = st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d")


@pytest.fixture(scope="module")
def named(smollm2, sentencepiece, wordpieces):
    return {"smollm2": smollm2, "sentencepiece": sentencepiece, "wordpieces": wordpieces}


@pytest.fixture(scope="module")
def byte_ids(named):
    """Per tokenizer, the token that stands for each single byte, as far as there is one."""
    return {
        kind: {tokenizer.token_bytes(token): token for token in range(len(tokenizer))}
        for kind, tokenizer in named.items()
    }


def stream(tokenizer, ids, **options):
    detokenizer = detokenizer_for(tokenizer, **options)
    pieces = [detokenizer.push(token) for token in ids]
    return pieces, detokenizer.finish()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_stream_equals_the_whole(named, kind, skip, data):
    tokenizer = named[kind]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 3), max_size=40))
    pieces, rest = stream(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(pieces) + rest == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["smollm2", "sentencepiece"])
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_random_bytes_equal_the_whole(named, byte_ids, kind, data):
    tokenizer, singles = named[kind], byte_ids[kind]
    wanted = data.draw(st.lists(st.sampled_from(range(256)), max_size=24))
    ids = [singles[bytes([byte])] for byte in wanted if bytes([byte]) in singles]
    pieces, rest = stream(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids)
    # Python's decoder is the reference for what broken UTF-8 looks like.
    expected = b"".join(tokenizer.token_bytes(token) for token in ids).decode("utf-8", "replace")
    assert tokenizer.decode(ids) == (expected.removeprefix(" ") if kind == "sentencepiece" else expected)


@pytest.mark.parametrize("kind", ["smollm2", "sentencepiece"])
@given(text=st.text(TEXT, max_size=30))
@settings(max_examples=200, deadline=None)
def test_no_piece_of_a_sound_text_has_half_a_character(named, kind, text):
    tokenizer = named[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces, rest = stream(tokenizer, ids, skip_special_tokens=False)
    assert ("".join(pieces), rest) == (text, "")
    assert "\ufffd" in text or all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["smollm2", "sentencepiece"])
@given(prompt=st.text(TEXT, min_size=1, max_size=12), answer=st.text(TEXT, max_size=12), data=st.data())
@settings(max_examples=200, deadline=None)
def test_an_answer_continues_its_prompt(named, kind, prompt, answer, data):
    """Wherever prompt and answer meet, even inside a character, the answer is the rest of the text."""
    tokenizer = named[kind]
    ids = tokenizer.encode(prompt + answer, add_special_tokens=False)
    cut = data.draw(st.integers(1, len(ids)))
    detokenizer = detokenizer_for(tokenizer, ids[:cut], skip_special_tokens=False)
    said = "".join(map(detokenizer.push, ids[cut:])) + detokenizer.finish()
    assert (prompt + answer).endswith(said)
    shown = tokenizer.decode(ids[:cut])
    # What the prompt shows, less a character it only began, and the answer are the whole text.
    assert shown.rstrip("\ufffd") + said == prompt + answer or "\ufffd" in prompt + answer or cut == len(ids)


def test_an_unfinished_character_shows_only_at_the_end(smollm2):
    ids = smollm2.encode("\U0001f600")
    detokenizer = detokenizer_for(smollm2)
    assert [detokenizer.push(token) for token in ids[:-1]] == [""] * (len(ids) - 1)
    assert detokenizer.holds_back
    assert detokenizer.finish() == "\ufffd"


def test_peek_says_what_push_will_and_changes_nothing(smollm2):
    ids = smollm2.encode("a \U0001f600 b")
    detokenizer = detokenizer_for(smollm2)
    for token in ids:
        said = detokenizer.peek(token)
        detokenizer.peek(ids[0])
        assert detokenizer.push(token) == said


def test_peek_shows_a_special_token_that_push_hides(smollm2):
    detokenizer = detokenizer_for(smollm2, [19556])
    assert detokenizer.peek(2) == "<|im_end|>"
    assert detokenizer.push(2) == ""


def pushed(detokenizer, ids):
    """The text that is certain behind the last of `ids`."""
    return "".join(map(detokenizer.push, ids))


def test_the_leading_space_of_an_answer_is_kept(sentencepiece):
    world = sentencepiece.encode("world", add_special_tokens=False)
    assert pushed(detokenizer_for(sentencepiece), world) == "world"
    assert pushed(detokenizer_for(sentencepiece, [5]), world) == " world"


def test_neighbouring_special_tokens_with_and_without_space(wordpieces):
    ids = [2, 1, 3]
    spaced = detokenizer_for(wordpieces, skip_special_tokens=False)
    assert pushed(spaced, ids) == "[CLS] [SEP] hello"
    glued = detokenizer_for(wordpieces, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert pushed(glued, ids) == "[CLS][SEP] hello"


def test_each_token_is_decoded_once(smollm2):
    """The cost of a token does not grow with the stream: its bytes are looked up once."""

    class Counting:
        leading_spaces = 0

        def __init__(self, pieces):
            self.pieces, self.lookups = pieces, 0

        def __getitem__(self, token):
            self.lookups += 1
            return self.pieces[token]

    class Stand:
        special_ids = frozenset()
        pieces = Counting(smollm2.pieces)

    detokenizer = detokenizer_for(Stand())
    for _ in range(500):
        detokenizer.push(19556)
    assert Stand.pieces.lookups == 500
