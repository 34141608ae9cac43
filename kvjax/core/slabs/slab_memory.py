"""One memory for pools of unlike pages: which pool has which slab, and what goes when a pool needs more.

Flow:    BlockPool.get_new_blocks -> [SlabMemory.provide] -> blank blocks -> EvictionPolicy.take
Source:  slabs that hold objects of one size at a time: Bonwick, "The Slab Allocator", USENIX Summer 1994

A slab is `blocks_per_slab` blocks of one pool, or free. Block b of a pool lies in slab `b // blocks_per_slab`, so
ids of one pool never change their meaning; those in slabs that the pool does not have are *elsewhere*: neither free nor
held. Slab 0 has the null block of every pool.

A pool that needs blocks takes, as long as it has too few blank ones, the first of these that there is:

    a free slab
    the slab of another pool, if the youngest of its blocks is older than the pool's own oldest one
    its own oldest blocks, as many as are older than that slab

so there is one order of eviction over all pools. The pool's own blocks that were released in this step go last.

What was found to fit stays so: `owed` are the blocks that pools may still take. Where few slabs are without a held
block, those that the others are owed are spared before a pool takes any.

Invariants (`check_invariants`):

    S1  a slab is free or one pool's, and slab 0 the null one: no byte is in two hands
    S2  blocks elsewhere are neither held, hashed nor with the policy; a pool counts them
    S3  blocks of a pool's own slabs are held or with its policy
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvjax.core.eviction.ranked_policy import RankClock, RankedPolicy
from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.slabs.slab_pool import SlabPool
from kvjax.core.slabs.whole_slabs import HELD, UNKNOWN, WholeSlabs
from kvjax.core.spec import SlabSpec
from kvjax.errors import InvariantError

FREE, NULL = -1, -2
NEXT = 16  # of a pool's free blocks one of so many may be made blank for the next step
AHEAD = 256  # and one of so many for those behind it
STEPS_AHEAD = 8  # that blocks are made blank for at once


class SlabCount(NamedTuple):
    """Slabs and blocks of one pool."""

    num_whole: int  # slabs without a held block
    num_whole_then: int  # if the hits were held
    num_beside_held: int  # free blocks in slabs that have a held one, if the hits were held
    num_free_hits: int  # that are not held now


class SlabMemory:
    """The slabs of some pools, which have none at first. Owned by one `KVCacheManager`; not thread-safe."""

    def __init__(self, spec: SlabSpec, pools: Sequence[BlockPool]) -> None:
        """
        Args:
            spec: of the memory.
            pools: all of `spec.num_slabs * blocks_per_slab` blocks, all of them free and blank.

        Raises:
            ValueError: a pool is of another size, or its policy ranks no blocks.
        """
        self.num_slabs = spec.num_slabs
        self.owner = np.full(spec.num_slabs, FREE, np.int8)
        self.owner[0] = NULL
        self._free_slabs = list(range(spec.num_slabs - 1, 0, -1))
        self.num_whole = len(self._free_slabs)  # at most as many as have no held block
        self.owed = [0] * len(pools)
        self.num_moved = 0  # slabs that a pool had and lost, so far
        clock = RankClock()
        for pool, per_slab in zip(pools, spec.blocks_per_slab, strict=True):
            _check_pool(pool, spec.num_slabs * per_slab)
        self.pools = tuple(
            SlabPool(self, number, pool, per_slab)
            for number, (pool, per_slab) in enumerate(zip(pools, spec.blocks_per_slab, strict=True))
        )
        self._whole = tuple(map(WholeSlabs, self.pools))
        for each in self.pools:
            each.policy.keep_ranks(clock)
            each.policy.lose(np.arange(1, each.pool.num_blocks))
            each.pool.join_slabs(each, (spec.num_slabs - 1) * each.blocks_per_slab)

    # -- whether blocks are there ------------------------------------------------------------------------------------

    def fit(self, needs: Sequence[int], hits: Callable[[], Sequence[np.ndarray]] | None = None) -> bool:
        """Whether the pools can take so many blocks, free ones of int64[k] `hits` a pool among them; then owed to them.

        Every block that is taken ends at most one whole slab. Only where that may not suffice slabs and hits are looked
        at.
        """
        fits = sum(needs) <= self.num_whole or self._fit_exactly(needs, None if hits is None else hits())
        if fits:
            self.owed = list(needs)
        return fits

    def _fit_exactly(self, needs: Sequence[int], hits: Sequence[np.ndarray] | None) -> bool:
        counts = self._count_whole(hits)
        num_whole = len(self._free_slabs) + sum(count.num_whole_then for count in counts)
        missing = [
            max(need - count.num_free_hits - count.num_beside_held, 0)
            for need, count in zip(needs, counts, strict=True)
        ]
        return sum(each.slabs_for(count) for each, count in zip(self.pools, missing, strict=True)) <= num_whole

    def _count_whole(self, hits: Sequence[np.ndarray] | None) -> list[SlabCount]:
        """Counts the slabs of each pool without a held block, which `num_whole` bounds from then on."""
        counts = [self._count(each, None if hits is None else hits[each.number]) for each in self.pools]
        self.num_whole = len(self._free_slabs) + sum(count.num_whole for count in counts)
        return counts

    def _count(self, each: SlabPool, hits: np.ndarray | None) -> SlabCount:
        """What a pool has, now and if int64[n] blocks `hits` were held."""
        num_whole = num_whole_then = each.whole_slabs().size
        num_free_hits = 0
        if hits is not None and hits.size:
            free_hits = np.unique(hits[each.pool.ref_count[hits] == 0])
            num_free_hits, slabs = free_hits.size, np.unique(free_hits // each.blocks_per_slab)
            num_whole_then -= int(np.count_nonzero(~each.ref_counts[slabs].any(1)))
        beside_held = each.policy.num_free - num_free_hits - num_whole_then * each.blocks_per_slab
        self._whole[each.number].look_again()
        return SlabCount(num_whole, num_whole_then, beside_held, num_free_hits)

    # -- providing blocks --------------------------------------------------------------------------------------------

    def provide(self, taker: SlabPool, num_blocks: int) -> None:
        """`SlabPool.provide`."""
        if any(self.owed):
            self._provide_owed(taker, num_blocks)
        elif num_blocks > taker.policy.num_blank:
            self._make_blank(taker, num_blocks)
        self.num_whole -= num_blocks

    def note_hits(self, taker: SlabPool, num_blocks: int) -> None:
        """`SlabPool.note_hits`."""
        self.owed[taker.number] = max(self.owed[taker.number] - num_blocks, 0)
        self.num_whole -= num_blocks

    def _provide_owed(self, taker: SlabPool, num_blocks: int) -> None:
        """Leaves other pools what they are owed."""
        if not self._all_have_blank_ones(taker, num_blocks):
            spared = self._spare_slabs(self._slabs_to_spare(taker, num_blocks))
            self._make_blank(taker, num_blocks)
            self._free_slabs += spared
        self.owed[taker.number] = max(self.owed[taker.number] - num_blocks, 0)

    def note_step_planned(self) -> None:
        """Makes blocks of each pool blank for the next step: half as many more as rows grew by one in the last ones.

        Where there are fewer, then for several steps at once.
        """
        self.owed = [0] * len(self.pools)
        for each in self.pools:
            if each.num_grown:
                each.num_ahead = max(each.num_grown + each.num_grown // 2, each.num_ahead - each.num_ahead // 8)
                each.num_grown = 0
                num_free = each.pool.num_free_blocks
                needed = min(each.num_ahead, num_free // NEXT)
                if each.policy.num_blank < needed:
                    more = min(STEPS_AHEAD * each.num_ahead, num_free // AHEAD)
                    self._make_blank(each, max(needed + needed // 2, more))

    def _make_blank(self, taker: SlabPool, num_blocks: int) -> None:
        """Lets the pool have so many blank blocks, as long as there are any; if it has too few, none is young then."""
        policy = taker.policy
        if policy.num_blank < num_blocks:
            policy.let_age()
        while (missing := num_blocks - policy.num_blank) > 0:
            if self._free_slabs:
                self._give(taker, taker.slabs_for(missing))
            elif not self._evict_oldest(taker, missing):
                return

    def _evict_oldest(self, taker: SlabPool, num_blocks: int) -> bool:
        """Makes blank or frees what is oldest, of the pool's blocks and others' slabs, for so many blocks or fewer.

        Returns:
            Whether there was any.
        """
        own = taker.policy.oldest_cached(max(num_blocks, taker.blocks_per_slab))
        own_ranks = taker.policy.ranks[own]
        num_own = 0
        others = [each for each in self.pools if each is not taker]
        slabs: list[list[int]] = [[] for _ in self.pools]
        while num_blocks > 0:
            giver, rank = self._oldest_of(others, may_look=not any(slabs))
            if num_own < own.size and own_ranks.item(num_own) < rank:
                most = num_own + max(num_blocks, taker.blocks_per_slab)
                num_older = int(np.searchsorted(own_ranks[:most], rank))
                num_blocks -= num_older - num_own
                num_own = num_older
            elif giver is not None:
                is_first = not any(slabs)
                slabs[giver.number].append(self._whole[giver.number].take())
                num_blocks -= taker.blocks_per_slab
                if is_first:  # mostly there are more to come
                    for each in others:
                        self._whole[each.number].check(taker.slabs_for(num_blocks))
            else:
                break
        for each in others:
            self._whole[each.number].end_check()
        if num_own:
            taker.make_blank(own[:num_own])
        for giver in self.pools:
            self._take_from(giver, slabs[giver.number])
        return num_own > 0 or any(slabs)

    def _oldest_of(self, pools: Sequence[SlabPool], may_look: bool = True) -> tuple[SlabPool | None, int]:
        """Who has the slab whose youngest block is oldest, and the rank of that block: `WholeSlabs.oldest`."""
        found: tuple[SlabPool | None, int] = (None, HELD)
        for each in pools:
            rank = self._whole[each.number].oldest(may_look)
            if rank == UNKNOWN:
                return None, UNKNOWN
            if rank < found[1]:
                found = (each, rank)
        return found

    def gather(self) -> bool:
        """Frees all slabs without held blocks; whether there was any that a pool had.

        What they cache is lost.
        """
        num_moved = self.num_moved
        for each in self.pools:
            self._take_from(each, each.whole_slabs().tolist())
        return self.num_moved > num_moved

    # -- where whole slabs are few -----------------------------------------------------------------------------------

    def _all_have_blank_ones(self, taker: SlabPool, num_blocks: int) -> bool:
        """Whether no pool needs another's blocks for what it is owed, nor the taker for so many."""
        owed = [*self.owed]
        owed[taker.number] = max(owed[taker.number], num_blocks)
        return all(count <= each.policy.num_blank for each, count in zip(self.pools, owed, strict=True))

    def _slabs_to_spare(self, taker: SlabPool, num_blocks: int) -> int:
        """Whole slabs that others are owed, if taking so many blocks anywhere may leave fewer; else 0.

        A block that is taken ends at most one whole slab.
        """
        others = [each for each in self.pools if each is not taker and self.owed[each.number]]
        if not others or self.num_whole - num_blocks >= sum(each.slabs_for(self.owed[each.number]) for each in others):
            return 0
        counts = self._count_whole(None)
        missing = [max(self.owed[each.number] - counts[each.number].num_beside_held, 0) for each in others]
        needed = sum(each.slabs_for(count) for each, count in zip(others, missing, strict=True))
        return needed if self.num_whole - num_blocks < needed else 0

    def _spare_slabs(self, count: int) -> list[int]:
        """So many slabs, or all, which no pool has then: free ones, else those whose youngest block is oldest."""
        while len(self._free_slabs) < count:
            giver, _ = self._oldest_of(self.pools)
            if giver is None:
                break
            self._take_from(giver, [self._whole[giver.number].take()])
        num_left = max(len(self._free_slabs) - count, 0)
        spared = self._free_slabs[num_left:]
        del self._free_slabs[num_left:]
        return spared

    # -- hands -------------------------------------------------------------------------------------------------------

    def _give(self, taker: SlabPool, num_slabs: int) -> None:
        """So many free slabs, or all."""
        num_left = max(len(self._free_slabs) - num_slabs, 0)
        slabs = self._free_slabs[num_left:][::-1]
        del self._free_slabs[num_left:]
        self.owner[slabs] = taker.number
        taker.gain(slabs)

    def _take_from(self, giver: SlabPool, slabs: list[int]) -> None:
        """Frees slabs without held blocks."""
        if slabs:
            giver.lose(slabs)
            self.owner[slabs] = FREE
            self.num_moved += len(slabs)
            self._free_slabs += slabs

    # -- for people and tests ----------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[int, ...]:
        """Who has each slab: the number of a pool, -1 a free slab, -2 the null one."""
        return tuple(self.owner.tolist())

    def check_invariants(self) -> None:
        """Raises InvariantError if one of them is broken. O(blocks)."""
        if sorted(self._free_slabs) != (self.owner == FREE).nonzero()[0].tolist():
            raise InvariantError("S1: the list of free slabs is not that of their owners")
        if self.owner[0] != NULL or (self.owner[1:] == NULL).any() or self.owner.max() >= len(self.pools):
            raise InvariantError(f"S1: slab 0 is not the null one, or another is: {self.snapshot()}")
        for each in self.pools:
            pool, is_elsewhere = each.pool, np.repeat(self.owner != each.number, each.blocks_per_slab)
            is_elsewhere[0] = False
            if is_elsewhere[each.blocks_per_slab :].sum() != pool.num_elsewhere:
                raise InvariantError(f"S2: pool {each.number} counts {pool.num_elsewhere} blocks elsewhere")
            if (pool.ref_count[is_elsewhere] != 0).any() or pool.is_hashed[is_elsewhere].any():
                raise InvariantError(f"S2: a block of pool {each.number} is held or hashed in a slab of another pool")
            num_blocks = each.slabs().size * each.blocks_per_slab
            if each.policy.num_free + np.count_nonzero(pool.ref_count) != num_blocks:
                raise InvariantError(f"S3: pool {each.number} has {num_blocks} blocks, and not all are held or free")
            if is_elsewhere[pool.eviction_policy.order()].any():
                raise InvariantError(f"S2: a block of pool {each.number} is free in a slab of another pool")


def _check_pool(pool: BlockPool, num_blocks: int) -> None:
    if pool.num_blocks != num_blocks:
        raise ValueError(f"expected pools of all blocks of their slabs, {num_blocks}, got one of {pool.num_blocks}")
    if not isinstance(pool.eviction_policy, RankedPolicy):
        raise ValueError(
            'expected eviction_policy "learned" or "probation" for pools that share slabs, got '
            f"{type(pool.eviction_policy).__name__}, which does not rank blocks of several pools"
        )


__all__ = ["SlabMemory"]
