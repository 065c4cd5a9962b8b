"""Tokenizers the front end's tests share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hardpoint.front_end.tokenizers import Tokenizer, load_tokenizer
from hardpoint.front_end.tokenizers.from_gguf import tokenizer_from_gguf

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    """The byte-level tokenizer inside the real GGUF file."""
    return load_tokenizer(smollm2_gguf)


@pytest.fixture(scope="session")
def sentencepiece_golden() -> dict:
    """A small SentencePiece model and what SentencePiece itself makes of some texts."""
    return json.loads((GOLDEN / "sentencepiece_small.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def sentencepiece_metadata(sentencepiece_golden: dict) -> dict:
    """That model as a GGUF file describes one."""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": sentencepiece_golden["tokens"],
        "tokenizer.ggml.scores": sentencepiece_golden["scores"],
        "tokenizer.ggml.token_type": sentencepiece_golden["token_type"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_metadata: dict) -> Tokenizer:
    """That model as a tokenizer."""
    return Tokenizer(tokenizer_from_gguf(sentencepiece_metadata, "small.gguf"))


@pytest.fixture(scope="session")
def wordpieces() -> Tokenizer:
    """A tokenizer whose text cannot be had by joining bytes."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    from hardpoint.front_end.tokenizers.tokenizer import TokenizerParts

    words = ["[UNK]", "[SEP]", "[CLS]", "hello", "world", "##ly", "##s", "!", "a", "b", "##c"]
    backend = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[UNK]", "[SEP]", "[CLS]"])
    return Tokenizer(TokenizerParts(backend, "wordpieces", special={"eos_token": "[SEP]", "unk_token": "[UNK]"}))
