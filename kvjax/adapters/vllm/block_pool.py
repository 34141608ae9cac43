"""A pool of kvjax with the names of vLLM's BlockPool: what schedulers, connectors and tests read and call of it.

Flow:    kvjax.core BlockPool -> [BlockPool] -> KVCacheManager.block_pool
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kvjax.core.hashing.block_hash import (
    BlockHash,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)
from kvjax.core.pool.block import BlockViews, KVCacheBlock
from kvjax.core.pool.block_pool import BlockPool as CorePool
from kvjax.core.requests.request import Request
from kvjax.core.watch.kv_events import KVCacheEvent


class FreeBlocks:
    """The free blocks of a pool, in eviction order."""

    def __init__(self, pool: CorePool) -> None:
        self._pool = pool

    @property
    def num_free_blocks(self) -> int:
        """How many there are."""
        return self._pool.num_free_blocks

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All of them, the next to be reused first."""
        return [self._pool.blocks[block_id] for block_id in self._pool.eviction_policy.order().tolist()]


class CachedBlocks:
    """The blocks that lookups can hit, by hash and group."""

    def __init__(self, pool: CorePool) -> None:
        self._pool = pool

    def __len__(self) -> int:
        return sum(map(len, self._pool.hash_maps.values()))

    def get_one_block(self, key: Any) -> KVCacheBlock | None:
        """A block of a packed hash and group id."""
        found = self._pool.get_cached_block(get_block_hash(key), [get_group_id(key)])
        return None if found is None else self._pool.blocks[found[0]]

    def contain(self, key: Any, block_id: int) -> bool:
        """Whether that block has that hash."""
        return self._pool.hash_maps[get_group_id(key)].contains(get_block_hash(key), block_id)

    def pop(self, key: Any, block_id: int) -> KVCacheBlock | None:
        """Forgets the hash of a block; None: it has another."""
        if not self.contain(key, block_id):
            return None
        self._pool.evict_blocks([block_id])
        return self._pool.blocks[block_id]


class BlockPool:
    """vLLM's names over one pool; blocks are views of it."""

    def __init__(
        self,
        pool: CorePool,
        reset: Callable[[], bool],
        take_events: Callable[[], list[Any]],
        translate: Callable[[KVCacheEvent], Any],
        in_blocks_of: Callable[[Any, int], tuple[Request, Sequence[BlockHash]]],
    ) -> None:
        self._pool = pool
        self._translate = translate
        self._in_blocks_of = in_blocks_of
        self.reset_prefix_cache = reset
        self.take_events = take_events
        self.num_gpu_blocks = pool.num_blocks
        self.enable_caching = pool.enable_caching
        self.hash_block_size = pool.hash_block_size
        self.enable_kv_cache_events = pool.enable_kv_cache_events
        self.free_block_queue = FreeBlocks(pool)
        self.cached_block_hash_to_block = CachedBlocks(pool)
        self.get_num_free_blocks = pool.get_num_free_blocks
        self.get_usage = pool.get_usage

    @property
    def blocks(self) -> BlockViews:
        """All blocks by id."""
        return self._pool.blocks

    @property
    def null_block(self) -> KVCacheBlock:
        """The block that fills skipped places of tables."""
        return self._pool.null_block

    @property
    def kv_event_queue(self) -> list[Any]:
        """The events that `take_events` returns next, to read."""
        return [self._translate(event) for event in self._pool.event_log.waiting]

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> list[KVCacheBlock] | None:
        """One block of the hash per group, or None if a group has none."""
        found = self._pool.get_cached_block(block_hash, kv_cache_group_ids)
        return None if found is None else [self._pool.blocks[block_id] for block_id in found]

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Forgets the hashes of blocks, held or free.

        Raises:
            AssertionError: an id is none of the pool, as in vLLM.
        """
        ids = sorted(block_ids)
        if ids and not 0 <= ids[0] <= ids[-1] < self.num_gpu_blocks:
            raise AssertionError(f"expected block ids in [0, {self.num_gpu_blocks}), got {ids[0]} to {ids[-1]}")
        self._pool.evict_blocks(np.array(ids, np.int64))

    def cache_full_blocks(
        self,
        request: Any,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Sequence[bool] | None = None,
    ) -> None:
        """Registers a request's blocks from `num_cached_blocks` to `num_full_blocks`, those of the mask."""
        chosen = blocks[num_cached_blocks:num_full_blocks]
        kept = [True] * len(chosen) if block_mask is None else block_mask
        ids = [block.block_id if is_kept else 0 for block, is_kept in zip(chosen, kept, strict=True)]
        known, hashes = self._in_blocks_of(request, block_size)
        self._pool.cache_full_blocks(known, ids, hashes, num_cached_blocks, kv_cache_group_id)

    def cache_partial_block(
        self,
        request: Any,
        block: KVCacheBlock,
        num_tokens: int,
        kv_cache_group_id: int,
        block_size: int,
        replace_existing_hashes: bool = False,
    ) -> Any:
        """Registers a block under the hash of tokens that end inside it; the hash with its group, None if null."""
        if block.is_null:
            return None
        known, hashes = self._in_blocks_of(request, self.hash_block_size)
        block_id, group_id = block.block_id, kv_cache_group_id
        self._pool.cache_inner(known, block_id, hashes, num_tokens, group_id, replace_existing_hashes)
        return make_block_hash_with_group_id(hashes[num_tokens // self.hash_block_size - 1], group_id)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Takes free blocks for a holder outside all requests; `free_blocks` returns them.

        Raises:
            ValueError: fewer are free.
        """
        ids = self._pool.get_new_blocks(num_blocks)
        self._pool.outside_refs.lend(ids.astype(np.int64))
        return [self._pool.blocks[block_id] for block_id in ids.tolist()]

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Adds a reference to each block, of a holder outside all requests; `free_blocks` drops it."""
        ids = self._ids(blocks)
        self._pool.touch(ids)
        self._pool.outside_refs.lend(ids)

    def hold(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Adds a reference to each of a request's blocks, which is no hit; `free_blocks` drops it."""
        ids = self._ids(blocks)
        self._pool.ref_count[ids] += 1
        self._pool.outside_refs.lend(ids)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Drops a reference of a holder outside all requests from each block, in eviction order."""
        ids = self._ids(ordered_blocks)
        self._pool.free_blocks(ids)
        self._pool.outside_refs.take_back(ids)

    @staticmethod
    def _ids(blocks: Iterable[KVCacheBlock]) -> np.ndarray:  # int64[n], null ones left out
        return np.array([block.block_id for block in blocks if not block.is_null], np.int64)


__all__ = ["BlockPool"]
