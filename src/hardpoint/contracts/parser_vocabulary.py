"""A tokenizer's vocabulary for parsers, of which there is one per answer: asked for once per tokenizer."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

_known: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()


def vocabulary_of(tokenizer: Any) -> dict[str, int]:
    """Token -> id. Building it takes a while where there are many tokens, so it is kept as long as the tokenizer."""
    try:
        found = _known.get(tokenizer)
    except TypeError:  # an object that cannot be a key
        return tokenizer.get_vocab()
    if found is None:
        found = _known[tokenizer] = tokenizer.get_vocab()
    return found
