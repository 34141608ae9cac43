"""Pools that share slabs, in lists: what `SlabMemory` decides, by looking at everything each time."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from math import inf

Block = tuple[int, int]  # pool, block
LASTING = 1 << 30  # above the ranks of all blocks on probation


@dataclass
class NaivePool:
    """Free blocks in order, of which some may be young: released in this step."""

    blocks_per_slab: int
    blank: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)  # in order of their ranks
    young: set[int] = field(default_factory=set)
    on_probation: set[int] = field(default_factory=set)  # free or held
    num_grown: int = 0
    num_ahead: int = 0

    @property
    def free(self) -> set[int]:
        return {*self.blank, *self.cached}

    def old(self, blocks: list[int]) -> list[int]:
        return [block for block in blocks if block not in self.young]

    def slab_of(self, block: int) -> int:
        return block // self.blocks_per_slab

    def blocks_of(self, slab: int) -> list[int]:
        return list(range(slab * self.blocks_per_slab, (slab + 1) * self.blocks_per_slab))


class NaiveSlabs:
    """Blocks that are not free here are held, or their slab is not the pool's."""

    def __init__(self, num_slabs: int, blocks_per_slab: list[int], ahead: int) -> None:
        self.pools = [NaivePool(count) for count in blocks_per_slab]
        self.ahead = ahead
        self.owner: dict[int, int] = {}  # slab -> pool; free ones are not in it
        self.free_slabs = list(range(num_slabs - 1, 0, -1))
        self.ranks: dict[Block, int] = {}  # of free blocks that are cached, or blank for what their pool needs next
        self.now = 0

    # What callers do.

    def fits(self, needs: list[int]) -> bool:
        """Whether whole slabs can be dealt out so that every pool has enough."""
        whole = [self.whole_slabs(p) for p in range(len(self.pools))]
        num_whole = len(self.free_slabs) + sum(map(len, whole))
        beside = [
            len([block for block in pool.free if pool.slab_of(block) not in slabs])
            for pool, slabs in zip(self.pools, whole, strict=True)
        ]
        return any(
            sum(dealt) <= num_whole
            and all(
                free + count * pool.blocks_per_slab >= need
                for free, count, pool, need in zip(beside, dealt, self.pools, needs, strict=True)
            )
            for dealt in product(range(num_whole + 1), repeat=len(self.pools))
        )

    def take(self, p: int, count: int) -> list[int]:
        pool = self.pools[p]
        self.make_blank(p, count)
        pool.num_grown += 1
        order = [*pool.old(pool.blank), *pool.old(pool.cached)]
        if len(order) < count:
            pool.young.clear()
            order = [*order, *(b for b in [*pool.blank, *pool.cached] if b not in order)]
        taken = order[:count]
        self.remove(p, taken)
        return taken

    def release(self, p: int, blocks: list[int], hashed: set[int]) -> None:
        pool = self.pools[p]
        for block in blocks:
            pool.young.add(block)
            if block not in hashed:
                pool.blank.append(block)
                self.ranks.pop((p, block), None)
        self.rank(p, [block for block in blocks if block in hashed])

    def touch(self, p: int, blocks: list[int]) -> None:
        self.remove(p, blocks)
        self.pools[p].on_probation -= set(blocks)

    def doubt(self, p: int, blocks: list[int]) -> None:
        """Held blocks are on probation."""
        self.pools[p].on_probation |= set(blocks)

    def keep(self, p: int, blocks: list[int]) -> None:
        """They are on probation no more; free ones count as used now, those that lasted first."""
        pool = self.pools[p]
        free = [block for block in blocks if block in pool.cached]
        free.sort(key=pool.on_probation.__contains__)
        pool.on_probation -= set(blocks)
        if free:
            pool.young.clear()
            pool.cached = [block for block in pool.cached if block not in free]
            self.rank(p, free)

    def step(self) -> None:
        for pool in self.pools:
            pool.young.clear()
        for p, pool in enumerate(self.pools):
            if pool.num_grown:
                pool.num_ahead = max(pool.num_grown + pool.num_grown // 2, pool.num_ahead - pool.num_ahead // 8)
                pool.num_grown = 0
                num_slabs = len(self.free_slabs) + sum(owner != p for owner in self.owner.values())
                num_free = len(pool.free) + num_slabs * pool.blocks_per_slab
                needed = min(pool.num_ahead, num_free // 16)
                if len(pool.blank) < needed:
                    self.make_blank(p, max(needed + needed // 2, min(8 * pool.num_ahead, num_free // self.ahead)))

    def evict(self, p: int, blocks: list[int]) -> None:
        """Free or held, those that last first."""
        self.forget(p, sorted(blocks, key=self.pools[p].on_probation.__contains__))

    def forget(self, p: int, blocks: list[int]) -> None:
        """Free cached blocks become blank."""
        pool = self.pools[p]
        pool.on_probation -= set(blocks)
        found = [block for block in blocks if block in pool.cached]
        if found:
            pool.young.clear()
        for block in found:
            pool.cached.remove(block)
            pool.blank.append(block)
            del self.ranks[p, block]

    def rank(self, p: int, blocks: list[int]) -> None:
        """Puts blocks among the cached free ones."""
        pool = self.pools[p]
        for block in blocks:
            self.ranks[p, block] = self.now + LASTING * (block not in pool.on_probation)
            self.now += 1
        pool.cached = sorted([*pool.cached, *blocks], key=lambda block: self.ranks[p, block])

    def rank_blank(self, p: int, blocks: list[int]) -> None:
        """Blank blocks count as used now."""
        for block in blocks:
            self.ranks[p, block] = self.now + LASTING
            self.now += 1

    # What it decides.

    def make_blank(self, p: int, count: int) -> None:
        pool = self.pools[p]
        if len(pool.old(pool.blank)) < count:
            pool.young.clear()
        while (missing := count - len(pool.old(pool.blank))) > 0:
            if self.free_slabs:
                self.give(p, self.free_slabs.pop())
            elif not self.evict_oldest(p, missing):
                return

    def evict_oldest(self, p: int, missing: int) -> bool:
        """Own blocks, and slabs of others, each in turn until there are enough."""
        pool = self.pools[p]
        taken: list[Block] = []
        num_evicted = 0
        while missing > 0:
            own = pool.cached[: max(missing, pool.blocks_per_slab)]
            others = [
                (self.rank_of(q, slab), q, slab)
                for q in range(len(self.pools))
                if q != p
                for slab in self.whole_slabs(q)
                if (q, slab) not in taken
            ]
            rank, q, slab = min(others, default=(inf, 0, 0))
            older = [block for block in own if self.ranks[p, block] < rank]
            if older:
                self.forget(p, older)
                self.rank_blank(p, older)
                missing -= len(older)
                num_evicted += len(older)
            elif others:
                taken.append((q, slab))
                missing -= pool.blocks_per_slab
            else:
                break
        for q, slab in sorted(taken, key=lambda pair: pair[0]):
            self.take_away(q, slab)
        return bool(num_evicted or taken)

    def whole_slabs(self, p: int) -> list[int]:
        pool = self.pools[p]
        return [s for s, owner in self.owner.items() if owner == p and pool.free.issuperset(pool.blocks_of(s))]

    def rank_of(self, p: int, slab: int) -> int:
        """Of the youngest block; blank ones without a rank are older than all."""
        return max(self.ranks.get((p, block), -1) for block in self.pools[p].blocks_of(slab))

    def give(self, p: int, slab: int) -> None:
        self.owner[slab] = p
        self.pools[p].young.clear()
        self.pools[p].blank += self.pools[p].blocks_of(slab)
        self.rank_blank(p, self.pools[p].blocks_of(slab))

    def take_away(self, p: int, slab: int) -> None:
        blocks = self.pools[p].blocks_of(slab)
        self.remove(p, blocks)
        self.pools[p].on_probation -= set(blocks)
        del self.owner[slab]
        self.free_slabs.append(slab)

    def remove(self, p: int, blocks: list[int]) -> None:
        pool = self.pools[p]
        pool.blank = [block for block in pool.blank if block not in blocks]
        pool.cached = [block for block in pool.cached if block not in blocks]
        pool.young -= set(blocks)
