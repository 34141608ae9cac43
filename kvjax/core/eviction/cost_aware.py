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

    C2  no priority is below the clock; C1 of `PriorityPolicy`
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvjax.core.eviction.hashed_blocks import HashedBlocks
from kvjax.core.eviction.priority_policy import PriorityPolicy
from kvjax.core.eviction.step_flow import StepFlow
from kvjax.errors import InvariantError


class CostAwarePolicy(PriorityPolicy):
    """A `PriorityPolicy` of uses, cost and a clock.

    Where steps free hashed blocks (windows) their rows are planned one by one, which takes twice the host's time.
    """

    def __init__(self, index: HashedBlocks, attention_parity_tokens: float = 30_500.0) -> None:
        if not attention_parity_tokens > 0:
            raise ValueError(f"expected attention_parity_tokens > 0, got {attention_parity_tokens}")
        super().__init__(index)
        self.attention_parity_tokens = attention_parity_tokens
        self._clock = 0.0
        self._uses = np.zeros(self.num_blocks, np.int32)  # 0 where a block is not hashed
        self._cost = np.zeros(self.num_blocks)
        self._start = np.zeros(self.num_blocks, np.int64)  # tokens before the block

    def _pop(self, num_blocks: int) -> np.ndarray:  # int64[num_blocks]
        """Moves the clock to the last one's priority."""
        ids = super()._pop(num_blocks)
        self._clock = max(self._clock, float(self._cached.priority_of(ids[-1])))
        self._forget(ids)
        return ids

    def _push(self, ids: np.ndarray) -> None:
        self._cached.push(ids, self._clock + self._values(ids))

    def _values(self, ids: np.ndarray) -> np.ndarray:  # float64[n]
        """`uses * cost` of each block, at least that of the blocks before it in its chain."""
        values = self._uses[ids] * self._cost[ids]
        starts = self._start[ids]
        begins_chain = starts[1:] >= starts[:-1]
        if not np.count_nonzero(begins_chain):
            return np.maximum.accumulate(values)
        by_value = np.argsort(values)
        rank = np.empty_like(by_value)
        rank[by_value] = np.arange(ids.size)
        rank[1:] += begins_chain.cumsum() * ids.size  # above all of the chains before
        return values[by_value[np.maximum.accumulate(rank) % ids.size]]

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
        """As `PriorityPolicy`; their uses and costs are gone."""
        self._forget(ids)
        super().note_forgotten(ids)

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
        """Checks C2, and what `PriorityPolicy` checks."""
        super().check_invariants()
        cached = self._cached.order()
        if cached.size and self._cached.priority_of(cached[0]) < self._clock:
            raise InvariantError(f"C2: a priority of {self._cached.priority_of(cached[0])} is below {self._clock}")
