"""Blocks that are hits of prefixes ending inside them: all hashes of a block come and go as they should."""

from __future__ import annotations

import numpy as np

from kvjax.core import BlockHasher, Request
from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.watch.kv_events import BlockRemoved, BlockStored

HASHER = BlockHasher(2, "xxhash_cbor", seed="0")


def pool_and_block() -> tuple[BlockPool, int]:
    pool = BlockPool(6, hash_block_size=2, enable_kv_cache_events=True)
    return pool, pool.get_new_blocks(1).item()


REQUEST = Request("r", range(8), block_hasher=HASHER)
HASHES = REQUEST.block_hashes  # of 2, 4, 6 and 8 tokens


def found(pool: BlockPool) -> list[int]:
    """Tokens of the hashes that lookups find."""
    return [2 * (i + 1) for i in range(4) if pool.get_cached_block(HASHES[i], [0]) is not None]


def test_more_tokens_take_the_place_of_fewer_and_fewer_stand_beside_more() -> None:
    pool, block = pool_and_block()
    for length, expected in ((2, [2]), (6, [6]), (4, [4, 6]), (4, [4, 6]), (8, [8])):
        pool.cache_inner(REQUEST, block, HASHES, length, 0)
        assert found(pool) == expected
        pool.check_invariants()
    events = pool.take_events()
    assert [type(event) for event in events] == [
        BlockStored, BlockRemoved, BlockStored, BlockStored, BlockRemoved, BlockRemoved, BlockStored,
    ]  # fmt: skip
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert [event.token_ids for event in stored] == [(0, 1), (4, 5), (2, 3), (6, 7)]
    assert [event.parent_block_hash for event in stored] == [None, HASHES[1], HASHES[0], HASHES[2]]
    assert {event.block_size for event in stored} == {2}


def test_another_content_takes_the_place_of_all() -> None:
    pool, block = pool_and_block()
    for length in (6, 4):
        pool.cache_inner(REQUEST, block, HASHES, length, 0)
    pool.cache_inner(REQUEST, block, HASHES, 2, 0, replaces=True)
    assert found(pool) == [2]
    pool.check_invariants()


def test_a_block_in_the_place_of_another_has_all_its_hashes() -> None:
    pool, block = pool_and_block()
    for length in (6, 4):
        pool.cache_inner(REQUEST, block, HASHES, length, 0)
    other = pool.get_new_blocks(1).item()
    pool.take_events()
    pool.move_hashes(block, other)
    assert found(pool) == [4, 6]
    assert pool.get_cached_block(HASHES[2], [0]) == [other]
    assert pool.take_events() == []
    pool.check_invariants()
    pool.move_hashes(block, other)  # which has none any more: nothing
    assert found(pool) == [4, 6]


def test_reuse_eviction_and_reset_forget_all() -> None:
    for forget in ("reuse", "evict", "reset"):
        pool, block = pool_and_block()
        for length in (8, 4, 6):
            pool.cache_inner(REQUEST, block, HASHES, length, 0)
        if forget == "evict":
            pool.evict_blocks([block])
        pool.free_blocks([block])
        if forget == "reset":
            assert pool.reset_prefix_cache()
        elif forget == "reuse":
            pool.get_new_blocks(5)
        assert found(pool) == []
        assert not pool.prefix_index.inner
        pool.check_invariants()


def test_lent_copies_keep_both_ends_until_they_are_given_back() -> None:
    pool = BlockPool(8)
    source, written, kept = pool.get_new_blocks(3).tolist()
    [to] = pool.page_edits.exchange_and_hold([source]).tolist()
    pool.page_edits.keep_copy(written, kept)
    pool.check_invariants()
    copies, held = pool.page_edits.lend_copies()
    pairs = sorted(zip(copies.sources.tolist(), copies.destinations.tolist(), strict=True))
    assert pairs == sorted([(source, to), (written, kept)])
    assert sorted(held.tolist()) == sorted([source, to, written, kept])
    assert pool.ref_count[[source, to, written, kept]].tolist() == [1, 2, 2, 1]
    pool.free_blocks(held)
    pool.outside_refs.take_back(np.array(held))
    pool.free_blocks([to, written])
    assert pool.num_free_blocks == 7
    pool.check_invariants()
