"""Word cutting of GGUF's kinds, against the same patterns run by another regex engine."""

from __future__ import annotations

import pytest
import regex

from hardpoint.front_end.tokenizers.pieces import byte_level_bytes
from hardpoint.front_end.tokenizers.pretokenizers import WORD_KINDS

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# As llama.cpp writes them: each cuts what the ones before left.
REFERENCE = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "llama-bpe": [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + TAIL],
    "qwen2": [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + TAIL],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"],
}
TEXTS = [
    "Hello world, it's we'll I'VE don't",
    "1234567 12 3.14159 2,000",
    "  two  spaces\t\ttabs\n\n  lines \r\n end  ",
    "na\u00efve caf\u00e9 \u00bd \u2167 \uff11\uff12\uff13",
    "\u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \u05e2\u05d1\u05e8\u05d9\u05ea \U0001f600\U0001f468\u200d\U0001f469",
    "x**2 <= {a|b} `code` $5 ~/path ^top",
    "!!!???... -- 'quoted' \u201cquoted\u201d",
    "",
    " ",
]


def reference_cut(patterns: list[str], text: str) -> list[str]:
    words = [text] if text else []
    for pattern in patterns:
        cut = []
        for word in words:
            at = 0
            for match in regex.finditer(pattern, word):
                cut += [word[at : match.start()], match.group()]
                at = match.end()
            cut.append(word[at:])
        words = [word for word in cut if word]
    return words


@pytest.mark.parametrize("name", REFERENCE)
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_words_are_cut_as_in_the_reference(name, text):
    words = WORD_KINDS[name].cut().pre_tokenize_str(text)
    assert [byte_level_bytes(word).decode() for word, _ in words] == reference_cut(REFERENCE[name], text)


@pytest.mark.parametrize("name", WORD_KINDS)
def test_every_kind_compiles_and_loses_nothing(name):
    for text in TEXTS:
        words = WORD_KINDS[name].cut().pre_tokenize_str(text)
        assert b"".join(byte_level_bytes(word) for word, _ in words).decode() == text


def test_the_kinds_promised_are_there():
    assert {"smollm", "llama-bpe", "qwen2", "gpt-2", "default"} <= WORD_KINDS.keys()
