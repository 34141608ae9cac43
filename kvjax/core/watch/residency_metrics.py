"""How long blocks stay, how long they lie idle and how soon they are reused, from a small sample of them.

Flow:    BlockPool get, touch, evict -> [KVCacheMetricsCollector] -> drain_events() -> histograms
Source:  what vLLM v1/core/kv_cache_metrics.py measures; the sampling is our own

Each allocation is sampled with probability `sample_rate`. Not every block draws a number: drawn is how many allocations
come before the next sampled one, which is equally distributed. So a call of n blocks costs O(samples), and n calls of
one block draw the same as one call of n. Each pool has a generator of its own, so pools do not disturb each other's
draws.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

NUM_KEPT_ACCESSES = 4
NEVER = 1 << 62


@dataclass(frozen=True)
class KVCacheEvictionEvent:
    """The residency of one sampled block, told when its contents went."""

    lifetime_seconds: float  # from allocation to eviction
    idle_seconds: float  # from the last access, or allocation if there was none, to eviction
    reuse_gaps_seconds: tuple[float, ...]  # between successive ones of the last NUM_KEPT_ACCESSES accesses


class BlockMetricsState:
    """A sampled block: when it was allocated and last accessed, and its latest accesses. Nanoseconds."""

    __slots__ = ("accesses_ns", "birth_ns", "last_access_ns")

    def __init__(self, now_ns: int) -> None:
        self.birth_ns = now_ns
        self.last_access_ns = now_ns
        self.accesses_ns: deque[int] = deque(maxlen=NUM_KEPT_ACCESSES)

    def record_access(self, now_ns: int) -> None:
        """Notes a prefix hit."""
        self.last_access_ns = now_ns
        self.accesses_ns.append(now_ns)

    def end(self, now_ns: int) -> KVCacheEvictionEvent:
        """The residency, ended now."""
        accesses = list(self.accesses_ns)
        return KVCacheEvictionEvent(
            lifetime_seconds=(now_ns - self.birth_ns) / 1e9,
            idle_seconds=(now_ns - self.last_access_ns) / 1e9,
            reuse_gaps_seconds=tuple((later - earlier) / 1e9 for earlier, later in pairwise(accesses)),
        )


class KVCacheMetricsCollector:
    """Samples the pools it is attached to, and keeps finished residencies until they are drained."""

    def __init__(self, sample_rate: float = 0.01, seed: int = 0, clock: Callable[[], int] = time.monotonic_ns) -> None:
        if not 0 <= sample_rate <= 1:
            raise ValueError(f"expected sample_rate in [0, 1], got {sample_rate}")
        self.sample_rate = sample_rate
        self.seed = seed
        self.clock = clock
        self._events: list[KVCacheEvictionEvent] = []
        self._pools: list[PoolResidency] = []

    def attach(self, num_blocks: int) -> PoolResidency:
        """The sample of one more pool. Equal collectors draw equal samples for pools attached in equal order."""
        rng = np.random.default_rng([self.seed, len(self._pools)])
        pool = PoolResidency(num_blocks, self.sample_rate, rng, self.clock, self._events)
        self._pools.append(pool)
        return pool

    def drain_events(self) -> list[KVCacheEvictionEvent]:
        """The residencies that ended since the last call."""
        events = list(self._events)
        self._events.clear()
        return events

    def reset(self) -> None:
        """Forgets all sampled blocks without an event; what has ended can still be drained."""
        for pool in self._pools:
            pool.reset()


class PoolResidency:
    """Sampled blocks of one pool. Ids are int64 arrays; calls cost a few microseconds and O(sampled blocks given)."""

    def __init__(
        self,
        num_blocks: int,
        sample_rate: float,
        rng: np.random.Generator,
        clock: Callable[[], int],
        events: list[KVCacheEvictionEvent],
    ) -> None:
        self._sample_rate = sample_rate
        self._rng = rng
        self._clock = clock
        self._events = events
        self._states: dict[int, BlockMetricsState] = {}
        self._is_sampled = np.zeros(num_blocks, np.bool_)
        self._next_sample = self._draw()  # allocations up to and including the next sampled one

    @property
    def num_sampled(self) -> int:
        """Blocks that are being observed."""
        return len(self._states)

    def on_blocks_allocated(self, block_ids: np.ndarray) -> None:
        """Decides which of the blocks to observe."""
        while self._next_sample <= len(block_ids):
            self._start(int(block_ids[self._next_sample - 1]))
            self._next_sample += self._draw()
        self._next_sample -= len(block_ids)

    def on_blocks_accessed(self, block_ids: np.ndarray) -> None:
        """Notes prefix hits of observed blocks."""
        for block_id in self._sampled(block_ids):
            self._states[block_id].record_access(self._clock())

    def on_blocks_evicted(self, block_ids: np.ndarray) -> None:
        """Ends the residency of observed blocks (distinct)."""
        for block_id in self._sampled(block_ids):
            self._events.append(self._states.pop(block_id).end(self._clock()))
            self._is_sampled[block_id] = False

    def reset(self) -> None:
        """Forgets the observed blocks without an event."""
        self._states.clear()
        self._is_sampled[:] = False

    def _start(self, block_id: int) -> None:
        self._states[block_id] = BlockMetricsState(self._clock())
        self._is_sampled[block_id] = True

    def _sampled(self, block_ids: np.ndarray) -> list[int]:
        return block_ids[self._is_sampled[block_ids]].tolist() if self._states else []

    def _draw(self) -> int:
        return int(self._rng.geometric(self._sample_rate)) if self._sample_rate else NEVER
