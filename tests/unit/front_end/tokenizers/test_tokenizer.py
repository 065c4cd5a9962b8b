"""The methods other code and plugins call on a tokenizer."""

from __future__ import annotations

import pytest


def test_vocabulary(smollm2):
    assert (len(smollm2), smollm2.vocab_size, smollm2.max_token_id) == (49152, 49152, 49151)
    assert smollm2.get_vocab()["<|im_end|>"] == 2
    assert smollm2.get_added_vocab()["<|im_start|>"] == 1
    assert smollm2.max_chars_per_token == max(map(len, smollm2.get_vocab()))


def test_tokens_and_ids(smollm2):
    ids = smollm2.encode("Hello world")
    tokens = smollm2.convert_ids_to_tokens(ids)
    assert tokens == ["Hello", "\u0120world"]
    assert smollm2.convert_tokens_to_ids(tokens) == ids
    assert smollm2.convert_tokens_to_ids("Hello") == ids[0]
    assert smollm2.convert_tokens_to_string(tokens) == "Hello world"
    assert smollm2.convert_ids_to_tokens([2, ids[0]], skip_special_tokens=True) == ["Hello"]
    assert smollm2.convert_ids_to_tokens([10**6]) == [""]


def test_decoding_takes_one_id_or_many(smollm2):
    assert smollm2.decode(19556) == "Hello"
    assert smollm2.decode([19556, 905]) == "Hello world"
    assert smollm2.decode([19556, 10**6, -1, 905]) == "Hello world"


def test_bytes_of_a_token_may_be_part_of_a_character(smollm2):
    ids = smollm2.encode("\U0001f600")
    assert len(ids) > 1
    assert b"".join(map(smollm2.token_bytes, ids)) == "\U0001f600".encode()


def test_bytes_where_tokens_are_words(wordpieces):
    assert wordpieces.token_bytes(3) == b"hello"


def test_truncation_keeps_the_end(smollm2):
    ids = smollm2.encode("one two three four")
    assert smollm2.encode("one two three four", max_length=2) == ids[-2:]


def test_calling_gives_ids_and_a_mask(smollm2):
    assert smollm2("Hello world") == {"input_ids": [19556, 905], "attention_mask": [1, 1]}
    assert smollm2(["Hello", "Hello world"])["attention_mask"] == [[1], [1, 1]]


def test_half_a_surrogate_pair_is_an_encoding_error(smollm2):
    with pytest.raises(UnicodeEncodeError):
        smollm2.encode("bad \ud800")


def test_special_tokens_reach_the_template(smollm2):
    said = smollm2.apply_chat_template([], chat_template="{{ bos_token }}{{ eos_token }}{{ own }}", own="x")
    assert said == "<|im_start|><|im_end|>x"


def test_normalisers_that_may_shorten_a_text_are_known(smollm2, sentencepiece, wordpieces):
    from tokenizers import normalizers

    assert smollm2.keeps_characters
    assert sentencepiece.keeps_characters
    wordpieces.backend.normalizer = normalizers.NFKC()
    assert not wordpieces.keeps_characters
