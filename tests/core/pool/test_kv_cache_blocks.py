"""KVCacheBlocks: arrays as the value, views on demand."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core import KVCacheBlocks
from tests.core.manager.manager_lockstep import FULL, HYBRID


def test_views_compare_by_pool_and_id() -> None:
    manager, other = FULL.manager([9]), FULL.manager([9])
    blocks = manager.create_kv_cache_blocks([[3, 1]])
    [views] = blocks.blocks
    assert views == [manager.block_pool.blocks[3], manager.block_pool.blocks[1]]
    assert views == manager.create_kv_cache_blocks([[3, 1]]).blocks[0]
    assert views[1:] == [manager.block_pool.blocks[1]]
    assert [block.block_id for block in views] == [3, 1]
    assert views[-1].block_id == 1
    assert len(views) == 2
    assert repr(views) == "BlockSequence([3, 1])"
    assert views != other.create_kv_cache_blocks([[3, 1]]).blocks[0]
    assert views != [manager.block_pool.blocks[3]]
    assert views != 3


def test_block_ids_as_lists() -> None:
    manager = HYBRID.manager([9])
    blocks = manager.create_kv_cache_blocks([[3], [], [0, 4]])
    assert blocks.get_block_ids() == ([3], [], [0, 4])
    assert blocks.num_blocks == 3
    assert repr(blocks) == "KVCacheBlocks([3], [], [0, 4])"
    empty = manager.empty_kv_cache_blocks
    assert empty.get_block_ids() == ([], [], [])
    assert empty.get_block_ids(allow_none=True) is None
    assert blocks.get_block_ids(allow_none=True) is not None
    assert blocks.new_empty() == empty
    assert blocks.get_block_ids(group_ids=[2, 0]) == ([0, 4], [3])
    assert blocks.get_block_ids(allow_none=True, group_ids=[1]) is None
    assert blocks.get_unhashed_block_ids_all_groups() == [[3], [], [4]]


def test_values_add_group_by_group() -> None:
    manager = HYBRID.manager([9])
    first, second = manager.create_kv_cache_blocks([[1], [2], []]), manager.create_kv_cache_blocks([[3], [], [4]])
    assert (first + second).get_block_ids() == ([1, 3], [2], [4])
    assert first + manager.empty_kv_cache_blocks == first
    assert first != second
    assert first != ([1], [2], [])
    with pytest.raises(ValueError, match="expected blocks of the same manager's groups, got blocks of other pools"):
        first + HYBRID.manager([9]).empty_kv_cache_blocks


def test_unhashed_blocks_of_the_one_group() -> None:
    manager = FULL.manager([9])
    pool = manager.block_pool
    ids = pool.get_new_blocks(3)
    pool.register_many(ids[:1], [b"h"], 0)
    blocks = KVCacheBlocks((np.array([0, *ids], np.int32),), (pool,))
    assert blocks.get_unhashed_block_ids() == ids[1:].tolist()
    pool.free_blocks(ids)
    with pytest.raises(ValueError, match="expected one KV-cache group, got 3; read `block_ids` instead"):
        HYBRID.manager([9]).empty_kv_cache_blocks.get_unhashed_block_ids()
