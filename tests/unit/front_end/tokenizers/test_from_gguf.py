"""The tokenizer inside a GGUF file, against ids from the files' own tokenizers."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

import pytest

from hardpoint.errors import ModelFileError
from hardpoint.front_end.tokenizers import Tokenizer
from hardpoint.front_end.tokenizers.from_gguf import tokenizer_from_gguf

GOLDEN = Path(__file__).parents[3] / "golden"
TOKENS = json.loads((GOLDEN / "smollm2_tokens.json").read_text(encoding="utf-8"))["cases"]
GREEDY = json.loads((GOLDEN / "smollm2_greedy.json").read_text(encoding="utf-8"))["cases"]
# Written with the visible characters of byte-level BPE: \u0120 is a space.
BYTES = [chr(c) for c in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144)]]


def byte_level(**changes) -> dict:
    """A small byte-level vocabulary as GGUF metadata."""
    tokens = [*BYTES, "he", "ll", "hell", "hello", "\u0120hello", "<|end|>", "<|turn|>", "<shown>"]
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * (len(tokens) - 3) + [3, 3, 4],
        "merges": ["h e", "l l", "he ll", "hell o", "\u0120 hello"],
        "eos_token_id": tokens.index("<|end|>"),
        "bos_token_id": tokens.index("<|turn|>"),
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}


def build(metadata: dict) -> Tokenizer:
    return Tokenizer(tokenizer_from_gguf(metadata, "test.gguf"))


@pytest.mark.parametrize("case", TOKENS, ids=range(len(TOKENS)))
def test_awkward_texts_have_the_reference_ids(smollm2, case):
    assert smollm2.encode(case["text"]) == case["ids"]
    assert smollm2.encode(case["text"], add_special_tokens=False) == case["ids"]
    assert smollm2.decode(case["ids"]) == case["text"]


@pytest.mark.parametrize("case", GREEDY, ids=range(len(GREEDY)))
def test_prompts_and_chats_have_the_reference_ids(smollm2, case):
    text = case["prompt"] if case["kind"] == "completion" else smollm2.apply_chat_template(case["messages"])
    assert text == case.get("rendered", text)
    assert smollm2.encode_chat(text) == case["prompt_ids"]
    assert smollm2.decode(case["generated_ids"]) == case["text"]


def test_any_text_comes_back(smollm2):
    pick = random.Random(7)
    printable = "".join(pick.choice(string.printable) for _ in range(4096))
    for text in (
        printable,
        "Caf\u00e9 d\u00e9j\u00e0 vu \u2014 123 \U0001f60a",
        "     ",
        "\t\n\r\n",
        "a\u00a0b",
        "\x00\x7f",
    ):
        assert smollm2.decode(smollm2.encode(text)) == text


def test_control_tokens_are_one_id_each_and_hidden_on_request(smollm2):
    ids = smollm2.encode("<|im_start|>user\nHi<|im_end|>\n")
    assert (ids[0], ids.count(2)) == (1, 1)
    assert smollm2.decode(ids, skip_special_tokens=True) == "user\nHi\n"
    assert smollm2.all_special_ids == list(range(17))
    assert (smollm2.bos_token_id, smollm2.eos_token_id) == (1, 2)


@pytest.mark.parametrize("place", range(60))
def test_sentencepiece_texts_have_its_own_ids(sentencepiece, sentencepiece_golden, place):
    case = sentencepiece_golden["cases"][place]
    assert sentencepiece.encode(case["text"], add_special_tokens=False) == case["ids"]
    assert sentencepiece.decode(case["ids"]) == case["text"]


def test_sentencepiece_begins_with_bos_unless_the_file_says_no(sentencepiece, sentencepiece_metadata):
    plain = sentencepiece.encode("Hello", add_special_tokens=False)
    assert sentencepiece.encode("Hello") == [1, *plain]
    silent = build({**sentencepiece_metadata, "tokenizer.ggml.add_bos_token": False})
    assert silent.encode("Hello") == plain
    both = build({**sentencepiece_metadata, "tokenizer.ggml.add_eos_token": True})
    assert both.encode("Hello") == [1, *plain, 2]


def test_sentencepiece_without_space_prefix(sentencepiece_metadata):
    tokenizer = build({**sentencepiece_metadata, "tokenizer.ggml.add_space_prefix": False})
    ids = tokenizer.encode("Hello", add_special_tokens=False)
    assert not tokenizer.convert_ids_to_tokens(ids)[0].startswith("\u2581")
    assert tokenizer.decode(ids) == "Hello"


def test_user_defined_tokens_are_whole_and_shown(sentencepiece):
    tool = sentencepiece.convert_tokens_to_ids("<tool>")
    ids = sentencepiece.encode("<tool>call", add_special_tokens=False)
    assert ids[0] == tool
    assert "<tool>" in sentencepiece.decode(ids, skip_special_tokens=True)
    assert tool not in sentencepiece.all_special_ids


def test_a_template_that_begins_with_bos_gets_no_second_one(sentencepiece):
    once = sentencepiece.encode_chat("<s>Hello", add_special_tokens=True)
    assert once == sentencepiece.encode("<s>Hello", add_special_tokens=False)
    assert once.count(1) == 1


def test_end_tokens_beside_eos_are_known():
    metadata = byte_level(eot_token_id=byte_level()["tokenizer.ggml.bos_token_id"])
    tokenizer = build(metadata)
    assert tokenizer.end_token_ids == {metadata["tokenizer.ggml.eot_token_id"]}


def test_llama_kind_keeps_whole_words_and_adds_bos():
    # "hello" is a token but no merge makes it.
    metadata = byte_level(pre="llama-bpe", merges=["h e"])
    tokenizer = build(metadata)
    bos, hello = tokenizer.bos_token_id, tokenizer.convert_tokens_to_ids("hello")
    assert tokenizer.encode("hello") == [bos, hello]
    other = build({**metadata, "tokenizer.ggml.pre": "gpt-2"})
    assert other.encode("hello") == [other.convert_tokens_to_ids(t) for t in ("he", "l", "l", "o")]


def test_named_chat_templates_are_read():
    metadata = {**byte_level(), "tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    tokenizer = build(metadata)
    assert tokenizer.get_chat_template() == "plain"
    assert tokenizer.get_chat_template(tools=[{}]) == "tools"
    assert tokenizer.get_chat_template("{{ own }}") == "{{ own }}"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pre": "no-such-kind"}, ["no-such-kind", "smollm", "llama-bpe", "qwen2"]),
        ({"model": "bert"}, ["'bert'", "gpt2", "llama"]),
        ({"model": None}, ["None"]),
        ({"tokens": None}, ["no token list"]),
        ({"tokens": ["a", "b", "a"], "token_type": None}, ["'a'", "twice"]),
        ({"token_type": [1]}, ["token_type", "1 entries"]),
        ({"merges": None}, ["no merges"]),
        ({"merges": ["h"]}, ["'h'", "two tokens"]),
        ({"merges": ["h zz"]}, ["zz"]),
        ({"merges": [1]}, ["merges", "no str"]),
        ({"eos_token_id": "two"}, ["eos_token_id", "str"]),
    ],
)
def test_what_cannot_be_used_is_said(changes, says):
    with pytest.raises(ModelFileError) as caught:
        build(byte_level(**changes))
    message = str(caught.value)
    assert "test.gguf" in message
    assert "--tokenizer" in message
    for word in says:
        assert word in message


def test_sentencepiece_without_scores_is_refused(sentencepiece_metadata):
    metadata = {key: value for key, value in sentencepiece_metadata.items() if not key.endswith("scores")}
    with pytest.raises(ModelFileError, match="no scores"):
        build(metadata)


def test_ids_past_the_vocabulary_name_no_token():
    tokenizer = build(byte_level(bos_token_id=10**6))
    assert tokenizer.bos_token_id is None
