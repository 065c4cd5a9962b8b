"""How long cached blocks live, sampled (`--kv-cache-metrics`)."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise

# (lifetime, idle before eviction, gaps between uses), in seconds
EvictionEvent = tuple[float, float, list[float]]

_KEPT_ACCESSES = 4


class BlockResidency:
    """Follows a sample of blocks from allocation to eviction."""

    def __init__(self, sample_rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._sample_rate = sample_rate
        self._clock = clock
        self._random = random.Random(0)
        self._born: dict[int, float] = {}
        self._accesses: dict[int, deque[float]] = {}
        self._events: list[EvictionEvent] = []

    def allocated(self, block_ids: Iterable[int]) -> None:
        """Blocks were given out anew."""
        now = self._clock()
        for block_id in block_ids:
            self._born.pop(block_id, None)
            if self._random.random() < self._sample_rate:
                self._born[block_id] = now
                self._accesses[block_id] = deque(maxlen=_KEPT_ACCESSES)

    def accessed(self, block_ids: Iterable[int]) -> None:
        """Cached blocks were used again."""
        now = self._clock()
        for block_id in block_ids:
            if block_id in self._born:
                self._accesses[block_id].append(now)

    def evicted(self, block_id: int) -> None:
        """A cached block is about to be reused for something else."""
        born = self._born.pop(block_id, None)
        if born is None:
            return
        now = self._clock()
        uses = list(self._accesses.pop(block_id))
        gaps = [later - earlier for earlier, later in pairwise(uses)]
        self._events.append((now - born, now - (uses[-1] if uses else born), gaps))

    def reset(self) -> None:
        """Stop following all blocks."""
        self._born.clear()
        self._accesses.clear()

    def take_events(self) -> list[EvictionEvent]:
        """The evictions since the last call."""
        events, self._events = self._events, []
        return events
