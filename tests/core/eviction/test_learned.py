"""What the learned policy is for: prefixes that come back outlive a flood, and parents outlive children."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvjax.core import BlockHasher, BlockPool, KVCacheManager, Request
from kvjax.core.eviction import LearnedPolicy
from kvjax.core.eviction.learned_table import LearnedTable
from kvjax.errors import InvariantError
from tests.core.eviction.naive_learned import NEW, NaiveLearned, NaiveRun, bin_of
from tests.core.manager.manager_lockstep import FULL, SETUPS
from tests.core.manager.prefill import compute_prompt

HASHER = BlockHasher(2, seed="learned")
OFTEN = partial(LearnedPolicy, learn_every=10)


def serve(manager: KVCacheManager, tokens: np.ndarray, name: str) -> int:
    """Hit tokens of a request that is looked up, computed and freed."""
    request = Request(name, tokens.astype(np.int32), block_hasher=HASHER)
    manager.new_step_starts()
    hit = compute_prompt(manager, request, tokens.size)
    manager.free(request)
    return hit


def full_manager(policy: Any, num_blocks: int = 80) -> KVCacheManager:
    return FULL.manager([num_blocks], eviction_policy=policy)


def flood(manager: KVCacheManager, num_requests: int, seed: int = 0) -> int:
    """Hits of ten prompts that come back every 20 requests, among prompts that never do, of 20 tokens each."""
    rng = np.random.default_rng(seed)
    returning = rng.integers(0, 99, (4, 20))
    hits = 0
    for i in range(num_requests):
        prompt = returning[i // 5 % 4] if i % 5 == 0 else rng.integers(100, 10_000, 20)
        hits += serve(manager, prompt, f"r{i}")
    return hits


def test_what_comes_back_outlives_what_does_not() -> None:
    """Between two uses of a prompt 19 others pass, and seven fit: LRU never hits, and who learns does."""
    assert flood(full_manager("lru"), 400) == 0
    hits = flood(full_manager(OFTEN), 400)
    assert hits > 0.5 * 18 * 80
    assert hits == flood(full_manager(OFTEN), 400)


def test_a_prefix_outlives_what_stands_on_it() -> None:
    """However little its class is worth: nobody can hit blocks whose prefix is gone."""
    manager = full_manager(OFTEN, 60)
    rng = np.random.default_rng(1)
    for i in range(300):
        length = int(rng.integers(4, 21))
        serve(manager, np.arange(20)[:length] + 100 * int(rng.integers(12)), f"r{i}")
        hashes = [HASHER.hash_tokens(np.arange(20, dtype=np.int32) + 100 * k) for k in range(12)]
        for chain in hashes:
            cached = manager.block_pool.find_each(chain, 0) >= 0
            assert not (cached[1:] & ~cached[:-1]).any()


@pytest.mark.parametrize("num_calls", [5, 250])
def test_a_restored_manager_goes_on_as_the_saved_one(num_calls: int) -> None:
    saved = full_manager("learned")
    flood(saved, num_calls)
    restored = KVCacheManager.restore(saved.save_state())
    assert restored.block_pool.eviction_policy.learned() == saved.block_pool.eviction_policy.learned()
    assert flood(restored, 250, seed=2) == flood(saved, 250, seed=2)
    assert restored.block_pool.snapshot() == saved.block_pool.snapshot()


def test_it_tells_what_it_learned() -> None:
    """A prompt's last block is computed again each time it comes back, so only what was hit is hit more often."""
    manager = full_manager(OFTEN)
    flood(manager, 400)
    by_name = {each.name: each for each in manager.block_pool.eviction_policy.learned()}
    assert by_name["hit more often"].uses > by_name["hit twice"].uses > 0
    worth = {name: dict(each.worth_by_age)[16] for name, each in by_name.items()}
    assert worth["hit more often"] > worth["never hit"]
    assert "never hit" in manager.block_pool.describe()
    assert "keeping brings in 1,000 requests" in manager.block_pool.describe()


@pytest.mark.parametrize("name", ["window", "hybrid", "full_mamba", "hybrid_pools"])
def test_where_a_group_forgets_lasting_blocks_go_by_lru(name: str) -> None:
    """The same calls leave the same order as under probation."""
    sizes = [40] * SETUPS[name].num_pools
    learned, probation = (SETUPS[name].manager(sizes, eviction_policy=policy) for policy in ("learned", "probation"))
    for i in range(120):
        rng = np.random.default_rng(i % 7)
        tokens = rng.integers(0, 9, 4 + i % 9)
        assert serve(learned, tokens, f"r{i}") == serve(probation, tokens, f"r{i}")
        for ours, theirs in zip(learned.block_pools, probation.block_pools, strict=True):
            assert ours.snapshot().free_order == theirs.snapshot().free_order
    assert learned.block_pool.eviction_policy.learned() == ()


@pytest.mark.parametrize(
    ("corrupt", "law"),
    [
        (lambda order: setattr(order, "num_free_blocks", 1), "D1: 1 blocks are counted"),
        (lambda order: order.keeper.runs.num_cached.__setitem__(9, 50), "R1: the cached blocks of a run"),
        (lambda order: order.keeper.runs.num_gone.__setitem__(9, 50), "R1: the ghosts of a run|D1"),
        (lambda order: order.keeper.runs.after.__setitem__(1, 2), "U1: the neighbours of run"),
        (lambda order: order.keeper.runs.waits.fill(False), "U1: run .* is in a list and does not wait"),
        (lambda order: order.keeper.runs.is_aside.__setitem__(1, True), "U1: run 1 is set aside and has no children"),
        (lambda order: order.keeper.runs.children.__setitem__(2, 5), "U2: the children of a run"),
        (lambda order: order.keeper.runs._unused.append(8), "U2: run 8 has no blocks and is in use, or has some"),
        (lambda order: setattr(order.keeper.ghosts, "num_blocks", 1), "1 remembered blocks are counted"),
    ],
)
def test_the_checker_sees_what_is_broken(corrupt: Any, law: str) -> None:
    manager = full_manager(OFTEN)
    flood(manager, 100)
    pool: BlockPool = copy.deepcopy(manager.block_pool)
    order = pool.eviction_policy._learned  # type: ignore[attr-defined]
    order._work_off()
    order.check_invariants()
    corrupt(order)
    with pytest.raises(InvariantError, match=law):
        order.check_invariants()


def test_a_run_that_is_held_is_not_used_again() -> None:
    """Two requests hit three blocks, the second while the first holds them: nobody waited for that."""
    pool = BlockPool(8, eviction_policy=partial(LearnedPolicy, learn_every=1))
    policy: Any = pool.eviction_policy
    blocks = pool.get_new_blocks(3)
    pool.register_many(blocks, [b"0", b"1", b"2"], 0, np.arange(3))
    pool.free_blocks(blocks[::-1])
    policy.note_step_planned()
    pool.touch(blocks)
    pool.touch(blocks)
    policy.note_admission()
    policy.note_step_planned()
    assert [each.uses for each in policy.learned()] == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_worth_is_what_its_definition_says(seed: int) -> None:
    """Uses and losses at all ages, twice, so that the first fade, and runs that still wait."""
    rng, table, naive = np.random.default_rng(seed), LearnedTable(), NaiveLearned(2)
    for now in (300_000, 330_000):
        for _ in range(80):
            of_class, age, was_used = int(rng.integers(5)), int(2 ** rng.uniform(0, 18)), bool(rng.random() < 0.5)
            (table.note_use if was_used else table.note_loss)(of_class, age)
            naive.ended.append((of_class, age, NEW))
            naive.uses += [(of_class, age, NEW)] * was_used
        classes, ages = rng.integers(0, 5, 20), (2 ** rng.uniform(0, 18, 20)).astype(int)
        waiting = zip([(0, 1, 2, 3, 5)[i] for i in classes], ages.tolist(), strict=True)
        naive.run_of = {i: NaiveRun(hits, since=now - age, waits=True) for i, (hits, age) in enumerate(waiting)}
        naive.now = now
        naive.learn()
        table.rebuild(now, classes, ages)
        for age in (*range(100), *(2 ** np.arange(7, 18)).tolist()):
            found = [table.worth_of(of_class, age) for of_class in range(5)]
            assert found == pytest.approx([naive.worth[of_class][bin_of(age)] for of_class in range(5)], rel=1e-5)


def test_it_learns_every_so_many_requests() -> None:
    pool = BlockPool(3, eviction_policy=partial(LearnedPolicy, learn_every=3))
    policy: Any = pool.eviction_policy
    block = pool.get_new_blocks(1)
    pool.register_many(block, [b"0"], 0, [0])
    for num_admitted in range(1, 8):
        pool.free_blocks(block)
        policy.note_step_planned()
        pool.touch(block)
        policy.note_admission()
        policy.note_step_planned()
        uses = sum(each.uses for each in policy.learned())
        assert uses == pytest.approx(num_admitted // 3 * 3, rel=1e-3)


def test_a_run_that_is_freed_in_parts_waits_from_the_last_of_them() -> None:
    """What became free meanwhile goes first, then all of the run."""
    pool = BlockPool(4, eviction_policy="learned")
    first, second, other = pool.get_new_blocks(3).tolist()
    pool.register_many([first, second, other], [b"0", b"1", b"2"], 0, [0, 1, 0])
    for released in ([second, first], [other]):
        pool.free_blocks(released)
        pool.eviction_policy.note_step_planned()
    pool.touch([first, second])
    pool.touch([other])
    for released in ([second], [other], [first]):
        pool.free_blocks(released)
        pool.eviction_policy.note_step_planned()
        pool.eviction_policy.note_admission()
    assert pool.get_new_blocks(3).tolist() == [other, second, first]


def test_a_block_that_was_free_before_its_twin_was_evicted_is_no_ghost_come_back() -> None:
    """Two blocks have the same tokens; one goes while the other waits, and nobody asked for them again."""
    pool = BlockPool(5, eviction_policy=partial(LearnedPolicy, learn_every=1))
    policy: Any = pool.eviction_policy
    blocks = pool.get_new_blocks(3)
    pool.register_many(blocks, [b"0", b"1", b"2"], 0, np.arange(3))
    pool.free_blocks(blocks[::-1])
    policy.note_step_planned()
    _, twin = pool.get_new_blocks(2).tolist()  # the last of the three
    pool.register_many([twin], [b"0"], 0, [0])
    pool.free_blocks([twin])
    policy.note_step_planned()
    assert pool.get_new_blocks(2).tolist() == blocks[1::-1].tolist()
    policy.note_step_planned()
    policy.note_admission()
    policy.note_step_planned()
    assert [each.uses for each in policy.learned()] == [0, 0, 0, 0, 0]
