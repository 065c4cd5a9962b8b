"""Token ids to text, one at a time, as they are generated."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hardpoint.front_end.tokenizers.pieces import PieceTable

if TYPE_CHECKING:
    from hardpoint.front_end.tokenizers.tokenizer import Tokenizer

_new_utf8 = codecs.getincrementaldecoder("utf-8")
# A UTF-8 character has at most four bytes, so at most three tokens can hold an unfinished one.
_TAIL = 4
_UNFINISHED = "\ufffd"


class IncrementalDetokenizer(ABC):
    """Turns a stream of token ids into text, never giving half of a UTF-8 character away.

    Everything `push` and `finish` return, joined, is the text `Tokenizer.decode` gives for the
    whole stream. Each token costs the same, however long the stream. Made by `detokenizer_for`.
    """

    @abstractmethod
    def push(self, token_id: int) -> str:
        """Add a token; return the text that is now certain: often the token's, sometimes none."""

    @abstractmethod
    def peek(self, token_id: int) -> str:
        """The text `push` would return, that of a hidden special token included; changes nothing."""

    @abstractmethod
    def finish(self) -> str:
        """End the stream; return what was held back, with U+FFFD for an unfinished character."""

    @property
    @abstractmethod
    def holds_back(self) -> bool:
        """Whether bytes of an unfinished character wait for the next token."""


def detokenizer_for(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> IncrementalDetokenizer:
    """Start a stream.

    prompt_token_ids               what the stream continues: a character begun by the prompt's last
                                   tokens comes out complete, a leading space is kept; empty for a
                                   text of its own
    skip_special_tokens            leave special tokens out of the text
    spaces_between_special_tokens  False joins neighbouring special tokens without the space that
                                   tokenizers of whole words put between tokens
    """
    skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
    tail = [token_id for token_id in prompt_token_ids[-_TAIL:] if token_id not in skipped]
    if tokenizer.pieces is not None:
        return _ByBytes(tokenizer.pieces, tail, skipped, continues=bool(prompt_token_ids))
    return _ByWindow(tokenizer, tail, skipped, glue_special=not spaces_between_special_tokens)


class _ByBytes(IncrementalDetokenizer):
    """Joins the bytes of tokens and decodes each character as it completes."""

    def __init__(self, pieces: PieceTable, tail: list[int], skipped: frozenset[int], *, continues: bool) -> None:
        self._pieces = pieces
        self._skipped = skipped
        self._utf8 = _new_utf8("replace")
        self._utf8.decode(b"".join([pieces[token_id] for token_id in tail]))
        # Spaces still to be taken from the start of the text.
        self._surplus = 0 if continues else pieces.leading_spaces

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._trimmed(self._utf8.decode(self._pieces[token_id]))

    def peek(self, token_id: int) -> str:
        state, surplus = self._utf8.getstate(), self._surplus
        text = self._trimmed(self._utf8.decode(self._pieces[token_id]))
        self._utf8.setstate(state)
        self._surplus = surplus
        return text

    def finish(self) -> str:
        return self._trimmed(self._utf8.decode(b"", final=True))

    @property
    def holds_back(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def _trimmed(self, text: str) -> str:
        while self._surplus and text:
            if text[0] != " ":
                self._surplus = 0
                break
            self._surplus -= 1
            text = text[1:]
        return text


class _ByWindow(IncrementalDetokenizer):
    """Decodes a short window of tokens again and again and gives out what its text grew by."""

    def __init__(self, tokenizer: Tokenizer, tail: list[int], skipped: frozenset[int], *, glue_special: bool) -> None:
        self._decode = tokenizer.decode
        self._special = tokenizer.special_ids
        self._skipped = skipped
        self._glue_special = glue_special
        # Tokens already given out, which decide how the next ones join, then those held back.
        self._given, self._held = tail, list[int]()

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        text = self._growth(token_id)
        if not text:
            return ""  # an id without a token has no part in how its neighbours join
        self._held.append(token_id)
        if text.endswith(_UNFINISHED) and len(self._held) < _TAIL:
            return ""
        self._given, self._held = self._held, []
        return text

    def peek(self, token_id: int) -> str:
        text = self._growth(token_id)
        return "" if text.endswith(_UNFINISHED) and len(self._held) + 1 < _TAIL else text

    def finish(self) -> str:
        text = self._growth()
        self._given, self._held = self._given + self._held, []
        return text

    @property
    def holds_back(self) -> bool:
        return bool(self._held)

    def _growth(self, *more: int) -> str:
        new = [*self._held, *more]
        if (
            self._glue_special
            and len(new) == 1
            and new[0] in self._special
            and self._special.issuperset(self._given[-1:])
        ):
            return self._decode(new)
        return self._decode(self._given + new)[len(self._decode(self._given)) :]
