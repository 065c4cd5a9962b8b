"""Tokenizers, built on the `tokenizers` library: no torch, no transformers."""

from hardpoint.front_end.tokenizers.detokenizer import IncrementalDetokenizer, detokenizer_for
from hardpoint.front_end.tokenizers.loading import get_tokenizer, load_tokenizer
from hardpoint.front_end.tokenizers.tokenizer import Tokenizer, TokenizerLike

__all__ = [
    "IncrementalDetokenizer",
    "Tokenizer",
    "TokenizerLike",
    "detokenizer_for",
    "get_tokenizer",
    "load_tokenizer",
]
