"""Answers that begin with reasoning or with what is bound, whichever the model likes: the first tokens tell."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping


class Reads(enum.Enum):
    """What the newest token makes of an answer's beginning."""

    MARK = "a start mark is complete: the model reasons"
    PART = "it may still become a start mark"
    OTHER = "it is no start mark"


class StartMarks:
    """The texts of which one begins the reasoning of an answer that has some, as far as they are written.

    ids       mark -> its token, for marks that are tokens
    token_of  the token of a piece of text; None when there is none
    """

    def __init__(self, marks: Iterable[str], ids: Mapping[str, int], token_of: Callable[[bytes], int | None]) -> None:
        marks = tuple(marks)
        self._whole = {ids[mark] for mark in marks if mark in ids}
        self._left = {mark.encode() for mark in marks}
        self._token_of = token_of

    def next_tokens(self) -> dict[int, bytes]:
        """The tokens that go on with a mark, each with its text; that of a whole mark is empty."""
        found: dict[int, bytes] = {}
        for left in self._left:
            for end in range(1, len(left) + 1):
                token = self._token_of(left[:end])
                if token is not None:
                    found[token] = left[:end]
        return {**found, **dict.fromkeys(self._whole, b"")}

    def take(self, token_id: int) -> Reads:
        """Take in the next token of the answer."""
        text = self.next_tokens().get(token_id)
        if text is None:
            return Reads.OTHER
        if not text or text in self._left:
            return Reads.MARK
        self._whole = set()
        self._left = {left[len(text) :] for left in self._left if left.startswith(text)}
        return Reads.PART
