"""Cost-aware: the block goes first whose loss costs least to repair, weighed by how often it was hit, and aged.

Source:  GreedyDual-Size-Frequency: Cherkasova, HPL-98-69R1, 1998; GreedyDual-Size: Cao, Irani, USITS 1997

A block's priority is set when it becomes free, and the lowest goes first:

    priority = clock + uses * cost        uses: 1 for who computed it, 1 for each hit
    cost     = tokens * (1 + middle / attention_parity_tokens)
    clock    = priority of the last hashed block that was taken: what is not hit again is overtaken in time

All blocks of a pool have one size, so GreedyDual's size drops out. Cost is the time to compute the block's tokens again
behind a cached prefix: matrix products are the same for each token, attention grows with the tokens before it, `middle`
on average. `attention_parity_tokens` is where both are equal: a token costs 2 FLOPs a weight, and 4 * layers * heads *
head_dim for each token that it attends to; for Llama 3 8B 2 * 8e9 / (4 * 32 * 32 * 128) = 30,500 tokens.

A prefix is worth more than what stands on it: without it no later block can be hit. So blocks that are released
together, a request's last block first, get at least the priority of those before them in the call, as long as positions
fall; equal ones go in that order. Blocks without a hash cost nothing and go before all others, in order of release.

Invariants (`check_invariants`):

    C1  blank blocks are unhashed, all others hashed
    C2  no priority is below the clock; O1 of the order
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from kvjax.core.eviction.policy import EvictionPolicy
from kvjax.core.eviction.priority_order import PriorityOrder
from kvjax.core.eviction.step_flow import StepFlow
from kvjax.core.free_queue import FreeKVCacheBlockQueue
from kvjax.core.prefix_index import PrefixIndex
from kvjax.errors import InvariantError


class CostAwarePolicy(EvictionPolicy):
    """A queue of unhashed blocks and a `PriorityOrder` of hashed ones."""

    is_told_of_use: ClassVar[bool] = True

    def __init__(self, index: PrefixIndex, attention_parity_tokens: float = 30_500.0) -> None:
        if not attention_parity_tokens > 0:
            raise ValueError(f"expected attention_parity_tokens > 0, got {attention_parity_tokens}")
        super().__init__(index)
        self.attention_parity_tokens = attention_parity_tokens
        self._blank = FreeKVCacheBlockQueue(self.num_blocks)
        self._blank.remove(0)
        self._cached = PriorityOrder(self.num_blocks)
        self._clock = 0.0
        self._uses = np.zeros(self.num_blocks, np.int32)  # 0 where a block is not hashed
        self._cost = np.zeros(self.num_blocks)
        self._start = np.zeros(self.num_blocks, np.int64)  # tokens before the block

    @property
    def num_free(self) -> int:
        """Blank and cached blocks."""
        return self._blank.num_free_blocks + self._cached.num_queued

    def take(self, num_blocks: int) -> np.ndarray:  # int64[num_blocks]
        """Blank ones, then those of lowest priority; these move the clock."""
        self.check_available(num_blocks)
        num_blank = min(num_blocks, self._blank.num_free_blocks)
        ids = self._blank.take(num_blank)
        if num_blank < num_blocks:
            cached = self._cached.pop(num_blocks - num_blank)
            self._clock = max(self._clock, float(self._cached.priority_of(cached[-1])))
            self._forget(cached)
            ids = np.concatenate((ids, cached))
        return ids

    def release(self, ids: np.ndarray) -> None:
        """Unhashed ones to the tail of the blank queue, others by priority."""
        hashed = self.index.is_hashed[ids]
        if np.count_nonzero(hashed) < ids.size:
            self._blank.append_distinct(ids[~hashed])
            ids = ids[hashed]
        if ids.size:
            self._cached.push(ids, self._clock + self._values(ids))

    def _values(self, ids: np.ndarray) -> np.ndarray:  # float64[n]
        """`uses * cost` of each block, at least that of the blocks before it in its chain."""
        values = self._uses[ids] * self._cost[ids]
        starts = self._start[ids]
        chain_ends = np.flatnonzero(starts[1:] >= starts[:-1]) + 1
        for chain in np.split(values, chain_ends):
            np.maximum.accumulate(chain, out=chain)
        return values

    def remove(self, ids: np.ndarray) -> None:
        """From the queue or the order."""
        cached = self._cached.contains_n(ids)
        self._cached.remove(ids[cached])
        self._blank.remove_n(ids[~cached])

    def order(self) -> np.ndarray:  # int32[num_free]
        """Blank ones in order of release, then by priority."""
        return np.concatenate((self._blank.get_all_free_blocks(), self._cached.order().astype(np.int32)))

    def bulk_equivalent(self, flow: StepFlow) -> int:
        """Rows before the first that releases a hashed block, whose chain must not run into another row's.

        Takes and releases of unhashed blocks do not meet while the blank queue lasts.
        """
        length = flow.rows_within(self.num_free)
        ids, positions = flow.released()
        if ids.size:
            hashed = self.index.is_hashed[ids]
            length = min(length, flow.rows_before(positions[hashed]))
            blank_from = flow.rows_before(positions[~hashed])
            length = min(length, max(flow.rows_within(self._blank.num_free_blocks), blank_from))
        return length

    def note_registered(self, ids: np.ndarray, starts: np.ndarray, block_size: int) -> None:
        """Their first use, and what they cost."""
        self._uses[ids] = 1
        self._start[ids] = starts
        self._cost[ids] = block_size * (1 + (starts + block_size / 2) / self.attention_parity_tokens)

    def note_hit(self, ids: np.ndarray) -> None:
        """One more use."""
        self._uses[ids] += self.index.is_hashed[ids]

    def note_forgotten(self, ids: np.ndarray) -> None:
        """Free ones join the blank queue."""
        self._forget(ids)
        free = ids[self._cached.contains_n(ids)]
        self._cached.remove(free)
        self._blank.append_distinct(free)

    def _forget(self, ids: np.ndarray) -> None:
        self._uses[ids] = 0
        self._cost[ids] = 0
        self._start[ids] = 0

    def state(self) -> tuple[Any, ...]:
        """The clock, the length of the blank queue, priorities in order, uses, costs and starts of all blocks."""
        priorities = self._cached.priority_of(self._cached.order())
        arrays = (priorities, self._uses, self._cost, self._start)
        return (self._clock, self._blank.num_free_blocks, *(tuple(array.tolist()) for array in arrays))

    def check_invariants(self) -> None:
        """Checks C1, C2, the queue and the order."""
        self._blank.check_invariants()
        self._cached.check_invariants()
        cached, is_hashed = self._cached.order(), self.index.is_hashed
        if is_hashed[self._blank.get_all_free_blocks()].any() or not is_hashed[cached].all():
            raise InvariantError("C1: a blank block is hashed, or one with a priority is not")
        if cached.size and self._cached.priority_of(cached[0]) < self._clock:
            raise InvariantError(f"C2: a priority of {self._cached.priority_of(cached[0])} is below {self._clock}")
