"""How much of the prompts the prefix cache answered.

Flow:    lookup, admission -> [PrefixCacheStats] -> KVCacheManager.make_prefix_cache_stats -> CachingMetrics
Source:  vLLM v1/metrics/stats.py
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass
class PrefixCacheStats:
    """Lookups of the requests admitted since the last reading: the last one of each, however long it waited.

    Requests that had blocks before and lost them (`Request.num_preemptions`) are looked up and admitted again; they
    count apart.
    """

    reset: bool = False  # the prefix cache was emptied since the last reading
    requests: int = 0
    queries: int = 0  # tokens of these requests
    hits: int = 0  # tokens that were found
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        """Adds one lookup of `num_tokens` tokens that found `num_hits`."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits


class CachingMetrics:
    """Token hit rate over the last `max_recent_requests` requests; the latest reading always counts."""

    def __init__(self, max_recent_requests: int = 1000) -> None:
        self._max_recent_requests = max_recent_requests
        self._recent: deque[tuple[int, int, int]] = deque()  # requests, queries, hits of one reading
        self._requests = self._queries = self._hits = 0

    def observe(self, stats: PrefixCacheStats) -> None:
        """Adds one reading; a reset forgets what came before it. A reading without requests adds nothing."""
        if stats.reset:
            self._recent.clear()
            self._requests = self._queries = self._hits = 0
        if not stats.requests:
            return
        self._recent.append((stats.requests, stats.queries, stats.hits))
        self._requests += stats.requests
        self._queries += stats.queries
        self._hits += stats.hits
        while len(self._recent) > 1 and self._requests > self._max_recent_requests:
            requests, queries, hits = self._recent.popleft()
            self._requests -= requests
            self._queries -= queries
            self._hits -= hits

    @property
    def empty(self) -> bool:
        """Whether no request was observed."""
        return self._requests == 0

    @property
    def hit_rate(self) -> float:
        """Tokens found per token looked up, 0.0 before the first."""
        return self._hits / self._queries if self._queries else 0.0
