"""Pools that share slabs: in lock step with lists, and what was found to fit fits."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvjax.core import BlockHasher, Request
from kvjax.core.eviction import EVICTION_POLICIES
from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.slabs import slab_memory, whole_slabs
from kvjax.core.slabs.slab_memory import SlabMemory
from kvjax.core.slabs.whole_slabs import HELD, UNKNOWN, WholeSlabs
from kvjax.core.spec import SlabSpec
from kvjax.errors import InvariantError, OutOfBlocksError
from tests.core.manager.manager_lockstep import HYBRID, Setup
from tests.core.slabs.naive_slabs import NaiveSlabs

NUM_QUICK = 6  # seeds; those of the sweep make a million calls in lock step
SEEDS = [*range(NUM_QUICK), *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(NUM_QUICK, 100))]
CALLS, CALLS_OF_SWEEP = 300, 1_600
AHEAD = (4, 256)  # free blocks for one that is made blank for several steps: most of all, or none


@dataclass
class World:
    """Pools of blocks that requests hold, in arrays and in lists."""

    num_slabs: int
    blocks_per_slab: list[int]
    seed: int
    ahead: int = AHEAD[0]
    held: list[list[int]] = field(init=False)  # per pool, oldest first
    num_hashes: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        spec = SlabSpec(self.num_slabs, tuple(self.blocks_per_slab))
        policies = ["learned", "probation"]
        self.pools = [
            BlockPool(self.num_slabs * count, group_ids=(p,), eviction_policy=policies[p % 2])
            for p, count in enumerate(self.blocks_per_slab)
        ]
        self.memory = SlabMemory(spec, self.pools)
        self.naive = NaiveSlabs(self.num_slabs, self.blocks_per_slab, self.ahead)
        self.held = [[] for _ in self.pools]

    def some(self, least: int, most: int) -> int:
        return int(self.rng.integers(least, most + 1))

    def call(self) -> None:
        p = self.some(0, len(self.pools) - 1)
        actions = [self.take] * 4 + [self.free] * 3 + [self.touch, self.evict, self.step, self.doubt, self.keep]
        actions[self.some(0, len(actions) - 1)](p)

    def take(self, p: int) -> None:
        count = self.some(1, 2 * self.blocks_per_slab[p])
        needs = [count if q == p else 0 for q in range(len(self.pools))]
        fits = self.memory.fit(needs)
        assert fits == self.naive.fits(needs)
        if not fits:
            return
        ids = self.pools[p].get_new_blocks(count).tolist()
        self.memory.pools[p].note_growth(1)
        assert ids == self.naive.take(p, count)
        self.register(p, [block for block in ids if self.rng.random() < 0.8])
        self.held[p] += ids

    def register(self, p: int, ids: list[int]) -> None:
        hashes = [b"%d" % (self.num_hashes + i) for i in range(len(ids))]
        self.num_hashes += len(ids)
        self.pools[p].register_many(ids, hashes, p)  # type: ignore[arg-type]

    def free(self, p: int) -> None:
        held = self.held[p]
        start = self.some(0, len(held))
        ids = held[start : start + self.some(1, 20)][::-1]
        self.held[p] = [block for block in held if block not in ids]
        self.naive.release(p, ids, set(np.flatnonzero(self.pools[p].is_hashed).tolist()))
        self.pools[p].free_held(np.array(ids, np.int64))

    def free_some(self, p: int) -> None:
        """Without the lists."""
        count = self.some(0, len(self.held[p]))
        self.pools[p].free_held(np.array(self.held[p][:count][::-1], np.int64))
        del self.held[p][:count]

    def some_hits(self, p: int) -> np.ndarray:
        """Free hashed blocks of one pool."""
        free = np.flatnonzero(self.pools[p].is_hashed & (self.pools[p].ref_count == 0))
        return self.rng.permutation(free)[: self.some(0, 2 * self.blocks_per_slab[p])]

    def touch(self, p: int) -> None:
        cached = self.naive.pools[p].cached
        if cached:
            ids = list(dict.fromkeys(cached[self.some(0, len(cached) - 1)] for _ in range(3)))
            self.pools[p].touch(ids)
            self.naive.touch(p, ids)
            self.held[p] += ids

    def evict(self, p: int) -> None:
        hashed = np.flatnonzero(self.pools[p].is_hashed)
        ids = self.rng.permutation(hashed)[:2]
        self.naive.evict(p, sorted(ids.tolist()))
        self.pools[p].evict_blocks(np.sort(ids))

    def doubt(self, p: int) -> None:
        """Some of the blocks that are held and hashed."""
        hashed = [block for block in self.held[p] if self.pools[p].is_hashed[block]]
        ids = self.rng.permutation(hashed).astype(np.int64)[: len(hashed) // 2]
        self.pools[p].eviction_policy.note_probation(ids)
        self.naive.doubt(p, ids.tolist())

    def keep(self, p: int) -> None:
        """Some of all that are hashed."""
        ids = self.rng.permutation(np.flatnonzero(self.pools[p].is_hashed))[:3]
        self.pools[p].eviction_policy.note_lasting(ids)
        self.naive.keep(p, ids.tolist())

    def step(self, p: int) -> None:
        for pool in self.pools:
            pool.eviction_policy.note_step_planned()
        self.memory.note_step_planned()
        self.naive.step()

    def compare(self) -> None:
        self.memory.check_invariants()
        owner = self.memory.snapshot()
        assert {slab: p for slab, p in enumerate(owner) if p >= 0} == self.naive.owner
        for pool, naive, held in zip(self.pools, self.naive.pools, self.held, strict=True):
            pool.check_invariants()
            assert set(pool.eviction_policy.order().tolist()) == naive.free
            assert np.flatnonzero(pool.ref_count).tolist() == sorted(held)
            free_and_hashed = [b for b in pool.eviction_policy.order().tolist() if pool.is_hashed[b]]
            assert free_and_hashed == [*naive.old(naive.cached), *(b for b in naive.cached if b in naive.young)]
            assert pool.num_usable_blocks - pool.num_free_blocks == len(held)


SHAPES = [(2, [1, 1]), (3, [4, 1]), (6, [3, 1]), (12, [5, 1]), (9, [2, 3, 7]), (24, [6, 1, 2]), (60, [4, 1]), (7, [8])]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_in_lock_step_with_lists(shape: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no slab is passed over that became old since slabs were noted."""
    ahead = AHEAD[seed % 2]
    monkeypatch.setattr(slab_memory, "AHEAD", ahead)
    oldest = WholeSlabs.oldest

    def look_at_all(self: WholeSlabs, may_look: bool = True) -> int:
        if may_look:
            self._noted.clear()
            self.look_again()
        rank = oldest(self, may_look)
        return HELD if rank == UNKNOWN else rank  # all are noted

    monkeypatch.setattr(WholeSlabs, "oldest", look_at_all)
    monkeypatch.setattr(whole_slabs, "NOTED", 1)
    world = World(*shape, seed, ahead)
    for _ in range(CALLS if seed < NUM_QUICK else CALLS_OF_SWEEP):
        world.call()
        world.compare()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_fits_can_be_taken_in_any_order(shape: Any, seed: int) -> None:
    """Also where pools take by turns, slabs are noted long before they are taken, and hits become held first."""
    num_slabs, blocks_per_slab = shape
    world = World(num_slabs, blocks_per_slab, seed)
    num_fitting = num_refused = 0
    for _ in range(CALLS):
        hits = [world.some_hits(p) for p in range(len(world.pools))]
        new = [world.some(0, 2 * k + 1) * world.some(0, 1) for k in blocks_per_slab]
        needs = [count + hit.size for count, hit in zip(new, hits, strict=True)]
        if world.memory.fit(needs, partial(tuple, hits)):
            num_fitting += 1
            for p, hit in enumerate(hits):
                world.pools[p].touch(hit)
                world.held[p] += hit.tolist()
            takes = [(p, count) for p, most in enumerate(new) for count in (most // 2, most - most // 2)]
            for p, count in world.rng.permutation(takes).tolist():
                ids = world.pools[p].get_new_blocks(count).tolist()
                world.register(p, ids[: len(ids) * 2 // 3])
                world.held[p] += ids
        else:
            num_refused += 1
            for p in range(len(world.pools)):
                world.free_some(p)
        if world.rng.random() < 0.3:
            world.free_some(world.some(0, len(world.pools) - 1))
        if world.rng.random() < 0.3:
            world.memory.note_step_planned()
        world.memory.check_invariants()
        for pool in world.pools:
            pool.check_invariants()
    assert num_fitting
    assert num_refused


def test_more_than_there_is_is_refused_and_nothing_changes() -> None:
    world = World(4, [4, 1], seed=0)
    ids = world.pools[0].get_new_blocks(9).tolist()
    assert not world.memory.fit([0, 1])
    with pytest.raises(OutOfBlocksError, match="needs 1 blocks, 0 free"):
        world.pools[1].get_new_blocks(1)
    world.memory.check_invariants()
    world.pools[0].free_blocks(ids)
    assert world.memory.fit([0, 3])
    assert not world.memory.fit([1, 3])


@pytest.mark.parametrize("name", [name for name in EVICTION_POLICIES if name not in ("learned", "probation")])
def test_policies_that_do_not_rank_are_refused(name: str) -> None:
    pool = BlockPool(8, eviction_policy=name)
    with pytest.raises(ValueError, match='expected eviction_policy "learned" or "probation"'):
        SlabMemory(SlabSpec(4, (2,)), [pool])


def test_pools_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="expected pools of all blocks of their slabs, 8, got one of 7"):
        SlabMemory(SlabSpec(4, (2,)), [BlockPool(7, eviction_policy="learned")])


def test_who_takes_more_blocks_than_there_are_slabs_leaves_the_rest_cached() -> None:
    """While another pool is owed blocks: nobody loses more than what is taken and owed."""
    world = World(101, [8, 1], seed=0)
    pages, _ = world.pools
    cached = pages.get_new_blocks(800)
    world.register(0, cached.tolist())
    pages.free_blocks(cached[::-1])
    assert world.memory.fit([160, 3])
    taken = pages.get_new_blocks(160)
    assert pages.num_hashed_blocks >= 800 - 160 - 8 * 3 - 8
    assert world.pools[1].get_new_blocks(3).size == 3
    world.memory.check_invariants()
    assert np.unique(taken).size == 160


@pytest.mark.parametrize(("slab", "owner"), [(0, 0), (1, slab_memory.NULL), (1, 2)])
def test_slabs_of_nobody_are_told(slab: int, owner: int) -> None:
    """The null slab is nobody else's, no other is null, and owners are pools."""
    world = World(3, [4, 1], seed=0)
    world.pools[0].get_new_blocks(5)  # the first of the other slabs, and one more
    world.memory.owner[slab] = owner
    with pytest.raises(InvariantError, match="S1: slab 0 is not the null one, or another is"):
        world.memory.check_invariants()


def test_slabs_of_another_pool_are_found_to_the_last() -> None:
    """Though some are noted at a time."""
    world = World(40, [2, 1], seed=0)
    ids = world.pools[0].get_new_blocks(78)
    world.register(0, ids.tolist())
    world.pools[0].free_held(ids)
    world.memory.note_step_planned()
    for _ in range(39):
        world.pools[1].get_new_blocks(1)
    assert world.memory.snapshot() == (slab_memory.NULL, *[1] * 39)


def test_pools_that_grow_do_not_take_from_each_other_what_they_made_ready() -> None:
    """What goes is what is cached longest, and no pool loses what it just got."""
    world = World(6_000, [32, 1], seed=0)
    pages, states = world.pools
    ids = states.get_new_blocks(5_999)
    world.register(1, ids.tolist())
    states.free_held(ids)
    num_steps, num_slabs = 40, 2
    for _ in range(num_steps):
        pages.get_new_blocks(32 * num_slabs)
        world.memory.pools[0].note_growth(32 * num_slabs)
        used = states.get_new_blocks(40)
        world.memory.pools[1].note_growth(40)
        world.register(1, used.tolist())
        states.free_held(used)
        world.step(0)
    ahead = slab_memory.STEPS_AHEAD * (num_slabs + num_slabs // 2)
    assert world.memory.num_moved <= num_steps * num_slabs + ahead


def test_gathering_frees_every_slab_without_a_held_block_and_counts_it() -> None:
    world = World(6, [4, 1], seed=0)
    pages, _ = world.pools
    ids = pages.get_new_blocks(9)
    world.register(0, ids.tolist())
    assert world.memory.num_moved == 0
    assert not world.memory.gather()
    pages.free_held(ids[2:6])  # the rest of a slab, and a part of the next
    assert not world.memory.gather()
    pages.free_held(ids[6:8])
    assert world.memory.gather()
    assert world.memory.num_moved == 1
    assert world.memory.snapshot().count(0) == 2
    assert np.flatnonzero(pages.is_hashed).tolist() == sorted(ids[[0, 1, 2, 3, 8]].tolist())
    assert not world.memory.gather()


def test_a_manager_gathers_slabs_where_its_pools_share_them() -> None:
    """What was cached in them is no hit any more; pools without slabs keep theirs."""
    for setup in (HYBRID, Setup(HYBRID.groups, blocks_per_slab=(4,))):
        manager = setup.manager([40])
        request = Request("r", range(9), block_hasher=BlockHasher(2, "xxhash_cbor", seed="0"))
        assert manager.allocate_slots(request, 9) is not None
        request.num_computed_tokens = 9
        manager.free(request)
        manager.new_step_starts()
        assert manager.gather_slabs() == bool(setup.blocks_per_slab)
        assert manager.get_computed_blocks(request)[1] == (0 if setup.blocks_per_slab else 8)
        assert not manager.gather_slabs()
