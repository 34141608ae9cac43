"""Blocks in order of a priority: lowest first, among equals the one that came first.

Flow:    CostAwarePolicy, BeladyPolicy -> [PriorityOrder.push] -> [pop]

A heap would cost a Python call a block. Here a sorted front of a few hundred blocks is kept, all others only in arrays:

    front   the first blocks when it was built, sorted; bound is the last one's priority. Some have left since
    late    blocks that came since then with a priority < bound; sorted in when blocks are popped next
    rest    all others; when the front runs out the next is cut from them by a partition, O(num_blocks)

Of equal blocks at the bound only as many are in the front as it has room for. A pop costs time for the whole front, and
most blocks may be equal. Where nothing is popped for long, late would grow with every push, also by blocks that have
left. So once it holds more entries than the front, both become one front, which is cut to its usual size: what is
behind belongs to the rest.

Invariants (`check_invariants`):

    O1  `num_queued` blocks have a ticket; front and late are the first of them, and all below the bound
    O2  late holds `num_late` entries, at most as many as the front or a new front does
"""

from __future__ import annotations

from math import isqrt

import numpy as np

from kvjax.errors import InvariantError

ABSENT = -1


class PriorityOrder:
    """Distinct blocks out of [0, num_blocks), none at first. Ids are int64 arrays.

    A push costs some 50 ns a block, a pop some 20 us, and of 200,000 blocks 1 to 5 us for each that is popped.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_queued = 0
        self._priority = np.zeros(num_blocks)  # meant where a block has a ticket
        self._ticket = np.full(num_blocks, ABSENT, np.int64)  # ascending in the order of pushes
        self._num_tickets = 0
        self._front_size = max(256, 4 * isqrt(num_blocks))
        self._bound = -np.inf
        self._front = _NONE  # int64[2, k] blocks and the tickets under which they are meant
        self._late: list[np.ndarray] = []  # likewise
        self._num_late = 0  # entries of all its arrays

    def contains_n(self, ids: np.ndarray) -> np.ndarray:  # bool[n]
        """Which of the blocks are here."""
        return self._ticket[ids] != ABSENT

    def priority_of(self, ids: np.ndarray) -> np.ndarray:  # float64[n]
        """Priorities of blocks that are here."""
        return self._priority[ids]

    def push(self, ids: np.ndarray, priorities: np.ndarray) -> None:
        """Adds blocks that are not here, in this order among equals."""
        tickets = np.arange(self._num_tickets, self._num_tickets + ids.size)
        self._num_tickets += ids.size
        self._priority[ids] = priorities
        self._ticket[ids] = tickets
        self.num_queued += ids.size
        late = priorities < self._bound
        if np.count_nonzero(late):
            entries = np.stack((ids[late], tickets[late]))
            self._late.append(entries)
            self._num_late += entries.shape[1]
            if self._num_late > max(self._front_size, self._front.shape[1]):
                self._lower_bound()

    def remove(self, ids: np.ndarray) -> None:
        """Removes blocks that are here."""
        self._ticket[ids] = ABSENT
        self.num_queued -= ids.size

    def pop(self, num_blocks: int) -> np.ndarray:  # int64[num_blocks]
        """Removes the first `num_blocks` blocks; there must be as many."""
        front = self._take_near()
        if front.shape[1] < num_blocks:
            front = self._cut_front(max(num_blocks, self._front_size))
        ids, self._front = front[0, :num_blocks], front[:, num_blocks:]
        self.remove(ids)
        return ids

    def order(self) -> np.ndarray:  # int64[num_queued]
        """All blocks, first one first."""
        ids = np.flatnonzero(self._ticket != ABSENT)
        return self._sorted(np.stack((ids, self._ticket[ids])))[0]

    def _take_near(self) -> np.ndarray:
        """Front and late together, in order, without blocks that have left; late is empty then."""
        front = self._live(self._front)
        if self._late:
            front = self._sorted(np.concatenate((front, self._live(np.concatenate(self._late, axis=1))), axis=1))
            self._late.clear()
            self._num_late = 0
        return front

    def _lower_bound(self) -> None:
        """Makes front and late one front of its usual size at most: O(log) a late block."""
        front = self._take_near()
        if front.shape[1] > self._front_size:
            front = front[:, : self._front_size].copy()
            self._bound = self._priority[front[0, -1]]
        self._front = front

    def _live(self, entries: np.ndarray) -> np.ndarray:
        """The entries of int64[2, k] blocks and tickets that still hold."""
        return entries[:, self._ticket[entries[0]] == entries[1]]

    def _sorted(self, entries: np.ndarray) -> np.ndarray:
        return entries[:, np.lexsort((entries[1], self._priority[entries[0]]))]

    def _cut_front(self, size: int) -> np.ndarray:
        """The first `size` blocks, or all, in order; sets the bound."""
        ids = np.flatnonzero(self._ticket != ABSENT)
        self._bound = np.inf
        if ids.size > size:
            keys = np.empty(ids.size, np.complex128)  # in order of priority, then ticket; equal keys would be slow
            keys.real, keys.imag = self._priority[ids], self._ticket[ids]
            places = np.argpartition(keys, size - 1)
            self._bound = keys[places[size - 1]].real
            ids = ids[places[:size]]
        return self._sorted(np.stack((ids, self._ticket[ids])))

    def check_invariants(self) -> None:
        """Checks O1 and O2.

        Raises:
            InvariantError: one of them does not hold.
        """
        ids = np.flatnonzero(self._ticket != ABSENT)
        if ids.size != self.num_queued:
            raise InvariantError(f"O1: {self.num_queued} blocks counted, {ids.size} have a ticket")
        near = self._live(np.concatenate([self._front, *self._late], axis=1))[0]
        order = self.order()
        is_first = np.array_equal(np.sort(near), np.sort(order[: near.size]))
        if not is_first or (self._priority[order[near.size :]] < self._bound).any():
            raise InvariantError("O1: a block below the bound is not in the front or late, or is there twice")
        num_late = sum(entries.shape[1] for entries in self._late)
        if num_late != self._num_late or num_late > max(self._front_size, self._front.shape[1]):
            raise InvariantError(f"O2: {num_late} late entries, {self._num_late} counted")


_NONE = np.empty((2, 0), np.int64)
