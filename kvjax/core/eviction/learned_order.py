"""Blocks in the order of what keeping them is worth: what an admission calls at once, and what waits until later.

Flow:    LearnedPolicy -> [LearnedOrder] -> (between steps) -> RunKeeper -> victims

Within a step calls are only written down. When a step is planned, or victims run out, `RunKeeper` works them off and
names runs to evict, whose blocks wait in the queue of victims. A victim that is hit leaves it. So a block is here in
one of three ways: it was released and that is not worked off, its run waits, or it is a victim.

Invariants (`check_invariants`):

    D1  `num_free_blocks` blocks are here, all victims among them; worked off, each other one is in a run that waits
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.core.eviction.free_queue import FreeKVCacheBlockQueue
from kvjax.core.eviction.hashed_blocks import HashedBlocks
from kvjax.core.eviction.run_keeper import RunKeeper
from kvjax.core.hashing.block_hash import BlockHash
from kvjax.errors import InvariantError

AHEAD = 32  # of the blocks here one of so many may be a victim before it is needed: decisions should not be old
MAX_PENDING = 32  # calls that are written down, before they are worked off though no victim is needed


class LearnedOrder:
    """`LastingBlocks`, of which the run that is worth least goes first. About 40 bytes a block of the pool."""

    def __init__(self, index: HashedBlocks, max_ghosts: int, learn_every: int) -> None:
        self._index = index
        num_blocks = index.is_hashed.size
        self.keeper = RunKeeper(index, max_ghosts, learn_every)
        self.num_free_blocks = self.num_young = 0
        self._is_here = np.zeros(num_blocks, np.bool_)
        self._victims = FreeKVCacheBlockQueue(num_blocks)
        self._victims.take(num_blocks)
        self._now = 0  # requests admitted
        self._num_taken = 0  # since a step was planned
        self._pending: list[tuple[bool, int, Sequence[int] | np.ndarray]] = []  # whether hit or released, when, blocks
        self._evicted: list[np.ndarray] = []  # runs of evicted blocks, since a step was planned
        self._evicted_hashes: list[BlockHash] = []

    def append_distinct(self, ids: np.ndarray, are_young: bool = False) -> None:
        """Adds blocks that became free, each request's last one first, young or not."""
        if ids.size:
            self._is_here[ids] = True
            self.num_free_blocks += ids.size
            self._pending.append((False, self._now, ids.copy()))

    def append_few(self, block_ids: Sequence[int], are_young: bool = False) -> None:
        """`append_distinct` of a few blocks."""
        for block_id in block_ids:
            self._is_here[block_id] = True
        self.num_free_blocks += len(block_ids)
        self._pending.append((False, self._now, tuple(block_ids)))

    @property
    def tells_young(self) -> bool:
        """No."""
        return False

    def contains_n(self, ids: np.ndarray) -> np.ndarray:  # bool[n]
        """Which blocks are here."""
        return self._is_here[ids]

    def remove_distinct(self, ids: np.ndarray) -> None:
        """Removes blocks that are here."""
        if ids.size:
            self._is_here[ids] = False
            self.num_free_blocks -= ids.size
            if self._victims.num_free_blocks:
                self._victims.remove_distinct(ids[self._victims.contains_n(ids)])

    def take(self, num_blocks: int) -> np.ndarray:  # int64[num_blocks]
        """Removes the next victims; there are as many blocks here."""
        self._name_victims(num_blocks)
        ids = self._victims.take(num_blocks)
        self._is_here[ids] = False
        self.num_free_blocks -= num_blocks
        self._num_taken += num_blocks
        return ids

    def get_all_free_blocks(self) -> np.ndarray:  # int64[num_free_blocks]
        """What a copy takes one after another."""
        twin = copy.deepcopy(self, {id(self._index): self._index})
        return twin.take(twin.num_free_blocks)

    def note_admission(self) -> None:
        """The clock goes on."""
        self._now += 1

    def note_kept(self, ids: np.ndarray) -> None:
        """Changes nothing: that is no hit."""

    def note_use(self, ids: np.ndarray) -> None:
        """Blocks that are held were hit, in the order of their prefixes; those without a hash are passed over."""
        hashed = self._index.is_hashed[ids]
        self._pending.append((True, self._now, ids if np.count_nonzero(hashed) == ids.size else ids[hashed]))

    def note_eviction(self, ids: np.ndarray, hashes: list[BlockHash]) -> None:
        """Blocks of these hashes were evicted."""
        self._evicted.append(self.keeper.leave_runs(ids))
        self._evicted_hashes += hashes

    def note_forgotten(self, ids: np.ndarray) -> None:
        """Blocks lost their hashes, free or held; free ones have been removed."""
        self._work_off()
        self.keeper.note_forgotten(ids)

    def note_step_planned(self) -> None:
        """Works calls off if there is a reason, then what was evicted; names victims where the last step took more."""
        is_due = self._now >= self.keeper.due_at
        if self._evicted or is_due or len(self._pending) > MAX_PENDING:
            self._work_off()
        if self._evicted:
            self.keeper.note_eviction(self._evicted, self._evicted_hashes, self._now)
            self._evicted, self._evicted_hashes = [], []
        if is_due:
            self.keeper.learn(self._now)
        if self._num_taken:
            wanted, self._num_taken = min(self._num_taken, self.num_free_blocks // AHEAD), 0
            self._name_victims(wanted)

    def _work_off(self) -> None:
        pending, self._pending = self._pending, []
        for was_hit, when, block_ids in pending:
            ids = np.asarray(block_ids, np.int64)
            if was_hit:
                self.keeper.note_use(ids, when)
            else:
                self.keeper.note_release(ids, when)

    def _name_victims(self, num_wanted: int) -> None:
        """Lets there be so many victims at least."""
        if self._victims.num_free_blocks < num_wanted:
            self._work_off()
        while self._victims.num_free_blocks < num_wanted and (ids := self.keeper.take_worst(self._now)) is not None:
            self._victims.append_distinct(ids)

    def state(self) -> tuple[Any, ...]:
        """The clock, victims, what is not worked off, runs and what was learned of them."""
        pending = tuple((hit, when, tuple(np.asarray(ids).tolist())) for hit, when, ids in self._pending)
        evicted = tuple(run for runs in self._evicted for run in runs.tolist()), tuple(self._evicted_hashes)
        victims = tuple(self._victims.get_all_free_blocks().tolist())
        return self._now, self._num_taken, victims, pending, evicted, self.keeper.state()

    def check_invariants(self) -> None:
        """Checks D1, the queue of victims and the keeper."""
        self._victims.check_invariants()
        here = np.flatnonzero(self._is_here)
        victims = self._victims.get_all_free_blocks()
        if here.size != self.num_free_blocks or not self._is_here[victims].all():
            raise InvariantError(
                f"D1: {self.num_free_blocks} blocks are counted, {here.size} are here, or a victim is not"
            )
        if not self._evicted:
            self.keeper.check_invariants()
        if sorted(self.get_all_free_blocks().tolist()) != here.tolist():
            raise InvariantError("D1: a block is in no run that waits")


__all__ = ["LearnedOrder"]
