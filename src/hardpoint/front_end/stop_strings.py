"""Find stop strings in a text that arrives in pieces, whatever the pieces are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop string that is complete.

    stop  the string
    end   characters of the fed piece up to and including its last one
    """

    stop: str
    end: int


class StopMatcher:
    """Watches a growing text for the first stop string to be complete.

    The one that ends earliest is the first; of several that end together, the longest. So the
    answer depends on the text alone and not on how it was cut into pieces. Each character costs
    a constant time per stop string (Knuth-Morris-Pratt).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        # The longest first, so that it wins among those that end together.
        self._stops = sorted(stops, key=len, reverse=True)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        # Per stop string: how many of its characters the text's end agrees with.
        self._matched = [0] * len(stops)

    def feed(self, piece: str, *, active: bool = True) -> StopMatch | None:
        """Add text. Inactive, a string that completes in this piece does not count."""
        for end, character in enumerate(piece, 1):
            for which, stop in enumerate(self._stops):
                if self._step(which, stop, character) and active:
                    return StopMatch(stop, end)
        return None

    def _step(self, which: int, stop: str, character: str) -> bool:
        matched, fallbacks = self._matched[which], self._fallbacks[which]
        while matched and (matched == len(stop) or stop[matched] != character):
            matched = fallbacks[matched - 1]
        matched += stop[matched] == character
        self._matched[which] = matched
        return matched == len(stop)

    @property
    def pending(self) -> int:
        """How many characters at the end of the text may begin a stop string."""
        return max(
            (
                fallbacks[-1] if matched == len(stop) else matched
                for matched, stop, fallbacks in zip(self._matched, self._stops, self._fallbacks, strict=True)
            ),
            default=0,
        )


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that also ends it."""
    lengths = [0] * len(stop)
    matched = 0
    for place in range(1, len(stop)):
        while matched and stop[matched] != stop[place]:
            matched = lengths[matched - 1]
        matched += stop[matched] == stop[place]
        lengths[place] = matched
    return lengths
