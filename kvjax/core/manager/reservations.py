"""Admission by worst case: a request enters only if all that run, and it, can go on to their ends side by side.

Flow:    SlotAllocator admits -> [Reservations] -> no later call of an admitted request is refused
Source:  ARCHITECTURE.md, "Admission by worst case"; cap of windowed kinds: vLLM v1/core/single_type_kv_cache_manager.py

A request reserves, per pool, the most blocks that it will ever hold at once: those of its final length, or for kinds
that release blocks before the end their admission cap, where that is less. Blocks that requests share count once for
each. So the sum is at least what they hold together: while it fits the pool, what a row still lacks is free.

Invariant (`check_invariants`):

    V1  a pool's total is the sum over its rows, at most its blocks; a row without a request reserves nothing
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvjax.core.pool.block_pool import BlockPool
from kvjax.errors import InvariantError


class Reservations:
    """What the rows of one manager have reserved. Owned by one `KVCacheManager`."""

    def __init__(self, pools: Sequence[BlockPool], max_in_flight_tokens: int) -> None:
        self._pools = pools
        self._max_in_flight_tokens = max_in_flight_tokens
        self._slots = np.zeros(0, np.int64)  # [rows] slots that the row may have
        self._blocks = np.zeros((len(pools), 0), np.int64)  # [pools, rows]
        self.totals = [0] * len(pools)  # per pool

    def reserve_rows(self, num_rows: int) -> None:
        """Makes the arrays hold `num_rows` rows."""
        missing = num_rows - self._slots.size
        self._slots = np.pad(self._slots, (0, missing))
        self._blocks = np.pad(self._blocks, ((0, 0), (0, missing)))

    def admits(self, num_blocks: Sequence[int]) -> bool:
        """Whether every pool can reserve as many blocks more, beside those that it holds outside block tables."""
        return all(
            total + more + pool.outside_refs.num_blocks <= pool.num_usable_blocks
            for total, more, pool in zip(self.totals, num_blocks, self._pools, strict=True)
        )

    def add(self, row: int, num_slots: int, num_blocks: Sequence[int]) -> None:
        """Reserves for a row that has nothing reserved."""
        self._slots[row] = num_slots
        self._blocks[:, row] = num_blocks
        self.totals = [total + more for total, more in zip(self.totals, num_blocks, strict=True)]

    def copy(self, row: int, new_row: int) -> None:
        """Reserves for a new row what another one has reserved."""
        self.add(new_row, self._slots.item(row), self.blocks_of(row))

    def blocks_of(self, row: int) -> list[int]:
        """Per pool what the row has reserved."""
        return self._blocks[:, row].tolist()  # type: ignore[no-any-return]

    def release(self, row: int) -> None:
        """Gives up what a row has reserved."""
        self.totals = [total - less for total, less in zip(self.totals, self._blocks[:, row].tolist(), strict=True)]
        self._slots[row] = 0
        self._blocks[:, row] = 0

    def check_step(self, num_slots: int, settled_tokens: int) -> None:
        """Raises ValueError for a step that takes more slots than the windows' cap counts with."""
        limit, given = self._max_in_flight_tokens, num_slots - settled_tokens
        if given > limit:
            raise ValueError(
                f"expected at most max_in_flight_tokens = {limit} new, lookahead and in-flight tokens with "
                f"reserve=True, got {given}"
            )

    def check_row(self, row: int, num_slots: int, settled_tokens: int) -> None:
        """Raises ValueError for a step of a row that its reservation does not cover."""
        self.check_step(num_slots, settled_tokens)
        if num_slots > self._slots.item(row):
            raise ValueError(
                f"row {row}: expected at most the {self._slots.item(row)} reserved slots (prompt, max_tokens and "
                f"lookahead at admission), got {num_slots}"
            )

    def check_rows(self, rows: np.ndarray, num_slots: np.ndarray, settled_tokens: np.ndarray) -> None:
        """`check_row` of int64[n] rows."""
        over = (num_slots > self._slots[rows]) | (num_slots - settled_tokens > self._max_in_flight_tokens)
        if over.any():
            i = int(over.argmax())
            self.check_row(rows.item(i), num_slots.item(i), settled_tokens.item(i))

    def check_invariants(self, owned_rows: Sequence[int]) -> None:
        """Raises InvariantError if V1 does not hold."""
        unowned = np.ones(self._slots.size, bool)
        unowned[list(owned_rows)] = False
        if self._slots[unowned].any() or self._blocks[:, unowned].any():
            raise InvariantError("V1: a row that no request owns has blocks reserved")
        for pool_id, (total, pool) in enumerate(zip(self.totals, self._pools, strict=True)):
            if total != self._blocks[pool_id].sum() or total > pool.num_usable_blocks:
                raise InvariantError(
                    f"V1: pool {pool_id}: {total} blocks reserved in all, {self._blocks[pool_id].sum()} by rows, "
                    f"{pool.num_usable_blocks} there"
                )
