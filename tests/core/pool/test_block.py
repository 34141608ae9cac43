"""Block views: live reads of the pool, equal by pool and id."""

from __future__ import annotations

import pytest

from kvjax.core.hashing.block_hash import get_block_hash, get_group_id
from kvjax.core.pool.block import KVCacheBlock
from kvjax.core.pool.block_pool import BlockPool


def test_a_view_reads_the_pool_as_it_is_now() -> None:
    pool = BlockPool(4, group_ids=(6,))
    block = pool.blocks[1]
    assert (block.block_id, block.ref_cnt, block.block_hash, block.is_null) == (1, 0, None, False)
    pool.register_many(pool.get_new_blocks(1), [b"h" * 32], 6)
    pool.touch([1])
    assert block.ref_cnt == 2
    key = block.block_hash
    assert key is not None
    assert (get_block_hash(key), get_group_id(key)) == (b"h" * 32, 6)
    assert repr(block) == "KVCacheBlock(block_id=1, ref_cnt=2, hashed=True, is_null=False)"


def test_views_compare_by_pool_and_id() -> None:
    pool, other = BlockPool(4), BlockPool(4)
    assert pool.blocks[1] == pool.blocks[1] == pool.blocks[-3]
    assert pool.blocks[1] != pool.blocks[2]
    assert pool.blocks[1] != other.blocks[1]
    assert pool.blocks[1] != 1
    assert len({pool.blocks[1], pool.blocks[1], other.blocks[1]}) == 2
    assert pool.null_block == pool.blocks[0]


def test_the_views_are_a_sequence() -> None:
    pool = BlockPool(4)
    assert len(pool.blocks) == 4
    assert [block.block_id for block in pool.blocks] == [0, 1, 2, 3]
    assert [block.block_id for block in pool.blocks[1:3]] == [1, 2]
    assert pool.blocks[2] in pool.blocks
    assert isinstance(pool.blocks[0], KVCacheBlock)
    with pytest.raises(IndexError, match="out of range"):
        pool.blocks[4]


def test_the_null_block_has_one_view() -> None:
    """So `block is pool.null_block` holds wherever the block is read."""
    pool = BlockPool(4)
    assert pool.blocks[0] is pool.null_block is pool.blocks[:2][0] is next(iter(pool.blocks))
    assert pool.blocks[1] == pool.blocks[1]
