"""Hit rate of a cache over its recent lookups."""

from __future__ import annotations

from collections import deque

from hardpoint.types.stats import BaseCacheStats


class CachingMetrics:
    """Sums the last `max_recent_requests` requests' lookups, in tokens or items."""

    def __init__(self, max_recent_requests: int = 1000) -> None:
        self._limit = max_recent_requests
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._recent: deque[tuple[int, int, int]] = deque()
        self._requests = self._queries = self._hits = 0

    def observe(self, stats: BaseCacheStats) -> None:
        """Add one report; what is older than the limit drops out."""
        if stats.reset:
            self.reset()
        if stats.requests == 0:
            return
        self._recent.append((stats.requests, stats.queries, stats.hits))
        self._requests += stats.requests
        self._queries += stats.queries
        self._hits += stats.hits
        while len(self._recent) > 1 and self._requests > self._limit:
            requests, queries, hits = self._recent.popleft()
            self._requests -= requests
            self._queries -= queries
            self._hits -= hits

    @property
    def empty(self) -> bool:
        """Whether nothing was looked up."""
        return self._requests == 0

    @property
    def hit_rate(self) -> float:
        """Hits per query, 0 when there were none."""
        return self._hits / self._queries if self._queries else 0.0
