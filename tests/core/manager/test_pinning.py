"""A pinned prefix stays a hit whatever else runs, and pins never keep a request from running."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvjax.core import BlockHasher, KVCacheManager, PinnedPrefix, Request
from kvjax.errors import BlockStateError, InvariantError, OutOfBlocksError
from tests.core.manager.manager_lockstep import FULL, SETUPS, Setup
from tests.core.manager.naive_manager import MAX_ENCODER, NaiveGroup
from tests.core.manager.page_contents import PageContents, Writes
from tests.core.manager.random_forks import RandomForks

HASHER = BlockHasher(2, "xxhash_cbor", seed="0")
CACHING = [name for name, setup in SETUPS.items() if setup.caching and name not in ("cross", "mamba_none")]


def computed(manager: KVCacheManager, num_tokens: int, name: str = "r", **options: Any) -> Request:
    """A request that is computed and gone; its blocks are free hits."""
    request = Request(name, range(num_tokens), block_hasher=HASHER, **options)
    encoder = MAX_ENCODER if manager.groups.reads_encoder else 0
    assert manager.allocate_slots(request, num_tokens, num_encoder_tokens=encoder) is not None
    manager.new_step_starts()
    manager.free(request)
    return request


def hit_of(manager: KVCacheManager, request: Request) -> int:
    """Tokens that a request hits that has one token more."""
    longer = Request("longer", [*request.token_ids.tolist(), 77], cache_salt=request.cache_salt, block_hasher=HASHER)
    return manager.get_computed_blocks(longer)[1]


@pytest.mark.parametrize("name", CACHING)
def test_a_pinned_prefix_survives_a_flood(name: str) -> None:
    setup = SETUPS[name]
    manager = setup.manager([120] * setup.num_pools)
    length = setup.max_model_len - 3
    request = computed(manager, length, cache_salt="input")
    expected = hit_of(manager, request)
    prefix = manager.pin(request)
    if prefix is None:
        assert expected == 0
        return
    assert prefix.num_tokens == expected
    for i in range(40):
        other = Request(f"o{i}", np.arange(length) + 100 * (i + 1), block_hasher=HASHER)
        assert manager.allocate_slots(other, length, num_encoder_tokens=MAX_ENCODER) is not None
        manager.free(other)
    manager.new_step_starts()
    assert hit_of(manager, request) == expected
    manager.check_invariants()
    manager.unpin(prefix)
    for i in range(40):
        other = Request(f"p{i}", np.arange(length) + 10_000 * (i + 1), block_hasher=HASHER)
        assert manager.allocate_slots(other, length, num_encoder_tokens=MAX_ENCODER) is not None
        manager.free(other)
    assert hit_of(manager, request) == 0
    assert all(pool.num_free_blocks == pool.num_usable_blocks for pool in manager.block_pools)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["full", "full_eagle", "hybrid", "hybrid_sizes", "hybrid_pools", "full_mamba_drafts"])
def test_pins_hold_among_random_forks(name: str, seed: int) -> None:
    """Whatever runs, is refused or forked: what is pinned is hit, and its pages hold what they held."""
    run = RandomForks(SETUPS[name], seed, options={"reserve": seed % 2 == 1})
    pinned: list[tuple[PinnedPrefix, Request]] = []
    for i in range(25):
        run.step()
        run.manager.new_step_starts()
        for prefix, request in pinned:
            assert run.manager.get_computed_blocks(request)[1] >= prefix.num_tokens
        if run.running and run.rng.random() < 0.5:
            request = run.running[0]
            tokens = request.token_ids[: request.num_computed_tokens].tolist() + [7]
            probe = Request(f"probe {i}", tokens, block_hasher=run.hasher)
            before = run.manager.snapshot()
            try:
                prefix_or_none = run.manager.pin(probe, longest_request=6)
            except OutOfBlocksError:
                assert run.manager.snapshot() == before
            else:
                if prefix_or_none is not None:
                    longer = Request(f"longer {i}", [*tokens, 7], block_hasher=run.hasher)
                    pinned.append((prefix_or_none, longer))
        if pinned and run.rng.random() < 0.3:
            run.manager.unpin(pinned.pop(0)[0])
        run.manager.check_invariants()
    for prefix, _ in pinned:
        run.manager.unpin(prefix)


def test_a_pin_holds_one_block_beyond_the_hit_for_eagle() -> None:
    """Not what lies further on, though it is cached: the window ends the hit."""
    manager = Setup((NaiveGroup(2, eagle=True), NaiveGroup(2, window=3)), eagle=True).manager([60])
    request = Request("r", range(20), block_hasher=HASHER)
    assert manager.allocate_slots(request, 20) is not None
    manager.new_step_starts()
    manager.evict_blocks(manager.get_block_ids("r")[1][4:])
    manager.free(request)
    prefix = manager.pin(request)
    assert prefix is not None
    assert prefix.num_tokens == hit_of(manager, request) == 8
    assert [len([block for block in ids if block]) for ids in prefix.block_ids] == [4 + 1, 1]
    manager.unpin(prefix)


@pytest.mark.parametrize("num_blocks", range(2, 16))
def test_pins_leave_room_for_the_longest_request(num_blocks: int) -> None:
    """At every size of the pool: whatever pins are granted, a request of that length runs to its end."""
    setup = Setup((NaiveGroup(2), NaiveGroup(2, window=3)), max_model_len=8, max_in_flight=2)
    manager = setup.manager([num_blocks])
    pins = []
    for i in range(8):
        request = Request(f"r{i}", np.arange(4) + 10 * i, block_hasher=HASHER)
        if manager.allocate_slots(request, 4) is None:
            break
        manager.free(request)
        before = manager.snapshot()
        try:
            pins.append(manager.pin(request))
        except OutOfBlocksError:
            assert manager.snapshot() == before
            break
    needed = 4 + 3  # of 8 tokens: full attention, and the window's cap
    assert len(pins) == max((num_blocks - 1 - needed) // 3, 0)
    if num_blocks - 1 < needed:
        return
    last = Request("last", np.arange(1) + 500, block_hasher=HASHER)
    for _ in range(8):
        assert manager.allocate_slots(last, 1) is not None
        last.num_computed_tokens += 1
        if last.num_tokens < 8:
            last.append_output_token_ids(3)


def test_a_shorter_longest_request_lets_more_be_pinned() -> None:
    manager = FULL.manager([8])
    request = computed(manager, 8)
    with pytest.raises(
        OutOfBlocksError, match="pinning 4 blocks leaves 3 of pool 0; a request of 24 tokens may need 12"
    ):
        manager.pin(request)
    assert manager.pin(request, longest_request=6) is not None


def test_with_reserve_pins_and_requests_leave_each_other_what_is_reserved() -> None:
    manager = FULL.manager([10], reserve=True)
    one, other = computed(manager, 4, "a", max_tokens=1), computed(manager, 9, "b", max_tokens=1)
    runs = Request("runs", range(50, 61), max_tokens=1)  # may need 6 blocks of 9
    assert manager.allocate_slots(runs, 1) is not None
    prefix = manager.pin(one, longest_request=2)
    with pytest.raises(OutOfBlocksError, match=r"pinning 2 blocks leaves 5 of pool 0; .* requests have reserved 6"):
        manager.pin(other, longest_request=2)
    late = Request("late", range(80, 84), max_tokens=1)  # may need 3
    assert manager.allocate_slots(late, 4) is None
    assert prefix is not None
    manager.unpin(prefix)
    assert manager.allocate_slots(late, 4) is not None


def test_a_block_may_be_pinned_more_than_once_and_while_it_is_held() -> None:
    manager = FULL.manager([30])
    device = PageContents(manager)
    request = Request("r", range(8), block_hasher=HASHER)
    assert manager.allocate_slots(request, 8) is not None
    device.run([Writes(request, 8)])
    request.num_computed_tokens = 8
    first, second = manager.pin(request), manager.pin(request)
    assert first is not None
    assert second is not None
    assert first.block_ids == second.block_ids == ((1, 2, 3, 4),)
    manager.free(request)
    manager.unpin(first)
    assert manager.block_pool.num_free_blocks == 25
    manager.unpin(second)
    assert manager.block_pool.eviction_policy.order()[-4:].tolist() == [4, 3, 2, 1]


def test_what_is_not_cached_is_not_pinned() -> None:
    manager = FULL.manager([30])
    assert manager.pin(Request("r", range(8), block_hasher=HASHER)) is None
    assert manager.pin(Request("r", range(8))) is None
    cross = SETUPS["full_cross"].manager([30])
    assert cross.pin(computed(cross, 8)) is None  # nothing names the encoder's input
    assert cross.pin(computed(cross, 8, "s", cache_salt="input")) is not None


def test_a_reset_waits_for_pins() -> None:
    manager = FULL.manager([30])
    prefix = manager.pin(computed(manager, 8))
    assert prefix is not None
    assert not manager.reset_prefix_cache()
    manager.evict_blocks(prefix.block_ids[0])
    assert hit_of(manager, Request("r", range(8), block_hasher=HASHER)) == 0
    manager.unpin(prefix)
    assert manager.reset_prefix_cache()


def test_bad_input() -> None:
    manager = FULL.manager([30])
    request = computed(manager, 8)
    with pytest.raises(ValueError, match="expected longest_request >= 1, got 0"):
        manager.pin(request, longest_request=0)
    prefix = manager.pin(request)
    assert prefix is not None
    manager.unpin(prefix)
    before = manager.snapshot()
    with pytest.raises(BlockStateError, match="expected a prefix that is pinned here, got pin 0"):
        manager.unpin(prefix)
    with pytest.raises(ValueError, match="expected a block_hasher of hash_block_size = 2"):
        manager.pin(Request("r", range(8), block_hasher=BlockHasher(4, seed="0")))
    assert manager.snapshot() == before


def test_the_checker_finds_references_that_nobody_holds() -> None:
    manager = FULL.manager([30])
    assert manager.pin(computed(manager, 8)) is not None
    outside = manager.block_pool.outside_refs.counts
    outside[1] -= 1
    with pytest.raises(InvariantError, match=r"N1: pool 0: pins and copies hold \[1, 2, 3, 4\]"):
        manager.pins.check_invariants()
    outside[1] += 1
