"""Kinds that lookups pass over: a hit of the other groups comes without their blocks."""

from __future__ import annotations

from kvjax.core import BlockHasher, FullAttentionSpec, KVCacheConfig, KVCacheManager, Request
from kvjax.core.kinds.unshared import ReplayedWindowMLASpec, RequestBufferSpec

SIZE, WINDOW = 4, 8
HASHER = BlockHasher(SIZE, "xxhash_cbor", seed="0")
FULL = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=8, dtype="float32")
REPLAYED = ReplayedWindowMLASpec(block_size=SIZE, sliding_window=WINDOW, head_size=8, dtype="float32")
BUFFER = RequestBufferSpec(block_size=6, num_bytes=12)


def test_a_hit_of_the_others_comes_with_new_blocks_of_these() -> None:
    """24 tokens hit: the next token sees tokens 17 to 23 of the window, so its columns from 4 on are new."""
    manager = KVCacheManager(KVCacheConfig.single_pool(60, FULL, REPLAYED, BUFFER), 64, SIZE)
    first, second = (Request(name, range(27), block_hasher=HASHER) for name in ("first", "second"))
    assert manager.allocate_slots(first, 27) is not None
    blocks, num_tokens = manager.get_computed_blocks(second)
    assert num_tokens == 24
    assert [len(ids) for ids in blocks.block_ids] == [6, 0, 0]
    assert manager.allocate_slots(second, 0, num_tokens, blocks) is not None  # the window is computed again first
    second.num_computed_tokens = 24 - WINDOW
    assert manager.allocate_slots(second, 27 - second.num_computed_tokens) is not None
    manager.check_invariants()
    old, new = manager.get_block_ids("first"), manager.get_block_ids("second")
    assert new[0][:6] == old[0][:6]
    assert new[1][:4] == [0, 0, 0, 0]
    assert len(new[1]) == 7
    assert not set(new[1][4:]) & set(old[1])
    assert len(new[2]) == len(old[2]) == 1
    assert new[2] != old[2]
