"""What the grammars of all our backends share: stop tokens, ends, and taking tokens back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

import numpy as np

from hardpoint.contracts.structured_output import StructuredOutputGrammar


class SteppedGrammar(StructuredOutputGrammar):
    """A grammar over a matcher that knows nothing of stop tokens.

    A stop token is allowed where the output is complete, and ends it there. A stop token that is
    text elsewhere (a client may name any) is text there.
    """

    def __init__(self, stop_token_ids: Iterable[int]) -> None:
        self.stop_token_ids = frozenset(stop_token_ids)
        self._stop_words, self._stop_bits = _bits(sorted(self.stop_token_ids))
        self._ended = False

    @abstractmethod
    def _advance(self, token_id: int) -> bool:
        """Take in a token of the text; False, with the state as it was, when it is not allowed."""

    @abstractmethod
    def _take_back(self, num_tokens: int) -> None:
        """Undo the last tokens of the text."""

    @abstractmethod
    def _allow(self, row: np.ndarray) -> None:
        """Set the bits of the tokens that may follow as text; `row` [words] int32 is all zeros."""

    @abstractmethod
    def _is_complete(self) -> bool:
        """Whether the text may end here."""

    @abstractmethod
    def _is_closed(self) -> bool:
        """Whether the text is complete and nothing may follow."""

    @abstractmethod
    def _restart(self) -> None:
        """Go back to the empty text."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Take in the output's next tokens; False when one of them is not allowed."""
        return all(self._accept(token) for token in tokens)

    def _accept(self, token_id: int) -> bool:
        if self._ended:
            return False
        if token_id in self.stop_token_ids and self._is_complete():
            self._ended = True
            return True
        return self._advance(token_id)

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """The leading part of `tokens` that would be accepted."""
        count = 0
        while count < len(tokens) and self._accept(tokens[count]):
            count += 1
        self.rollback(count)
        return tokens[:count]

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens."""
        if num_tokens and self._ended:
            self._ended = False
            num_tokens -= 1
        if num_tokens:
            self._take_back(num_tokens)

    def fill_bitmask(self, bitmask: np.ndarray, batch_index: int) -> None:
        """Write the allowed next tokens into a row."""
        row = bitmask[batch_index]
        row[:] = 0
        if not self._ended:
            self._allow(row)
        if self._ended or self._is_complete():
            np.bitwise_or.at(row, self._stop_words, self._stop_bits)

    def is_terminated(self) -> bool:
        """Whether the output is complete and nothing can follow."""
        return self._ended or self._is_closed()

    def reset(self) -> None:
        """Go back to the start."""
        self._ended = False
        self._restart()


def _bits(token_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Word and bit of each token."""
    ids = np.array(token_ids, np.int64)
    return ids // 32, (np.uint32(1) << (ids % 32).astype(np.uint32)).view(np.int32)


def set_bits(row: np.ndarray, token_ids: Iterable[int]) -> None:
    """Allow tokens in a row."""
    for token in token_ids:
        row[token // 32] |= np.uint32(1 << (token % 32)).view(np.int32)


def clear_bits(row: np.ndarray, token_ids: Iterable[int]) -> None:
    """Forbid tokens in a row."""
    for token in token_ids:
        row[token // 32] &= np.int32(~np.uint32(1 << (token % 32)).view(np.int32))


def allows_other(row: np.ndarray, token_ids: Iterable[int]) -> bool:
    """Whether a row allows a token beside the given ones."""
    left = row.copy()
    clear_bits(left, token_ids)
    return bool(left.any())
