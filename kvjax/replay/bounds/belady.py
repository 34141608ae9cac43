"""Belady's rule: evict the block that the trace needs again last. It knows the future, so it is a bound, not a policy.

Flow:    trace -> [LookAhead] -> [BeladyPolicy] -> BlockPool of a replay
Source:  Belady: A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5(2), 1966

In which sense it is a bound: no choice of which free block to reuse gives more hit tokens in a serial replay on one
group that caches whole prefixes (full attention, MLA) with the same number of blocks. There each request asks for
blocks of one size in a known order. A block is needed no later than the blocks that stand on it. So the rule keeps
whole prefixes (among equals the deeper block goes first), and every block that it keeps until its next use is hit.
`tests/replay/bounds/test_belady.py` compares it with all possible choices on small traces.

Where hits change what is asked for, it is no bound, though usually a good policy:

    continuous batching   a request that hits more ends sooner, and running requests hold blocks
    windows               need little of a prefix
    several groups        have hits that depend on each other
    work, not tokens      blocks differ in the work that a hit saves
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from kvjax.core.eviction import HashedBlocks, StepFlow
from kvjax.core.eviction.priority_policy import PriorityPolicy
from kvjax.core.hashing.block_hash import BlockHash
from kvjax.replay.requests.trace import TraceRequest


class LookAhead:
    """Which request of a trace uses a block next. Requests are decided on (admitted or refused) in the trace's order.

    A hash id stands for a whole prefix, so uses are kept by hash id; `learn` says which blocks belong to an id.
    Requests of more than `num_blocks` blocks, which will be refused, use nothing.
    """

    def __init__(self, trace: Sequence[TraceRequest], block_size: int, num_blocks: int) -> None:
        trace_block_size = trace[0].hash_block_size
        if trace_block_size % block_size:
            raise ValueError(
                f"expected a block size that divides {trace_block_size}, the trace's, to look ahead, got {block_size}"
            )
        self._blocks_per_id = trace_block_size // block_size
        self._users: dict[int, list[int]] = {}  # hash id -> requests, ascending
        self._num_used: dict[int, list[int]] = {}  # hash id -> how many of the id's blocks each can hit
        self._place_of: dict[BlockHash, int] = {}  # block -> hash id * blocks_per_id + place in it
        self.next_request = 0  # the first that is not decided on
        self.never = 0  # a request number for blocks that are not used again
        for request in trace:
            num_hittable = (request.input_length - 1) // block_size
            if num_hittable < num_blocks:
                self._add(self.never, request, num_hittable)
            self.never += 1

    def _add(self, number: int, request: TraceRequest, num_hittable: int) -> None:
        """Notes the blocks that a request can hit: all but that of its last token."""
        for hash_id in request.hash_ids[: -(-num_hittable // self._blocks_per_id)]:
            self._users.setdefault(hash_id, []).append(number)
            self._num_used.setdefault(hash_id, []).append(min(num_hittable, self._blocks_per_id))
            num_hittable -= self._blocks_per_id

    def learn(self, request: TraceRequest, block_hashes: Sequence[BlockHash]) -> None:
        """Takes the hashes of the next request's blocks."""
        size = self._blocks_per_id
        for index, hash_id in enumerate(request.hash_ids):
            users = self._users.get(hash_id)
            if users and users[-1] > self.next_request:
                places = range(hash_id * size, (hash_id + 1) * size)
                self._place_of.update(zip(block_hashes[index * size : (index + 1) * size], places, strict=False))

    def advance(self) -> None:
        """The next request was decided on."""
        self.next_request += 1

    def next_use(self, block_hash: BlockHash | None) -> int:
        """The first request not decided on that can hit the block, or `never`."""
        place = self._place_of.get(block_hash) if block_hash is not None else None
        if place is None:
            return self.never
        hash_id, place_in_id = divmod(place, self._blocks_per_id)
        users, num_used = self._users[hash_id], self._num_used[hash_id]
        for i in range(bisect_left(users, self.next_request), len(users)):
            if num_used[i] > place_in_id:
                return users[i]
        return self.never


class BeladyPolicy(PriorityPolicy):
    """Unhashed blocks first, then by next use, the latest first, and by position, the deepest first.

    Uses that have passed are renewed when blocks are taken; `order` tells them as they stand.
    """

    def __init__(self, index: HashedBlocks, look_ahead: LookAhead) -> None:
        super().__init__(index)
        self._look_ahead = look_ahead
        self._next_use = np.full(self.num_blocks, look_ahead.never, np.int64)
        self._start = np.zeros(self.num_blocks, np.int64)
        self._looked_at = 0  # `next_request` when uses were looked up last

    def _pop(self, num_blocks: int) -> np.ndarray:  # int64[num_blocks]
        self._look_again()
        return super()._pop(num_blocks)

    def _push(self, ids: np.ndarray) -> None:
        self._next_use[ids] = [self._next_use_of(block_id) for block_id in ids.tolist()]
        self._cached.push(ids, -(self._next_use[ids] * 2.0**26 + self._start[ids]))  # exact: both fit in 53 bits

    def _next_use_of(self, block_id: int) -> int:
        """Never where another block of the same hash is the one that lookups find."""
        block_hash = self.index.hash_of(block_id)
        assert block_hash is not None  # it is hashed
        return self._look_ahead.next_use(block_hash) if self.index.is_found(block_id) else self._look_ahead.never

    def _look_again(self) -> None:
        """Renews uses that have passed: their requests did not hit the block."""
        if self._looked_at < self._look_ahead.next_request:
            self._looked_at = self._look_ahead.next_request
            ids = self._cached.order()
            ids = ids[self._next_use[ids] < self._looked_at]
            self._cached.remove(ids)
            self._push(ids)

    def bulk_equivalent(self, flow: StepFlow) -> int:
        """Rows before the first that releases anything: it might be taken at once."""
        return min(flow.rows_within(self.num_free), flow.rows_before(flow.released()[1]))

    def note_registered(self, ids: np.ndarray, starts: np.ndarray, block_size: int) -> None:
        """Their positions."""
        self._start[ids] = starts
