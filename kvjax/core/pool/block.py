"""One block as an object: a view into its pool for reading and debugging, never part of a hot path.

Flow:    BlockPool arrays -> [KVCacheBlock] -> KVCacheBlocks.blocks, people
Source:  attributes of vLLM v1/core/kv_cache_utils.py (KVCacheBlock), without state of its own
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, overload

import numpy as np

from kvjax.core.hashing.block_hash import BlockHash, BlockHashWithGroupId, make_block_hash_with_group_id


class BlockStates(Protocol):
    """What a view reads of its pool."""

    NULL_BLOCK_ID: int
    num_blocks: int
    ref_count: np.ndarray  # int32[num_blocks]

    def block_hash_of(self, block_id: int) -> BlockHash | None:
        """Hash that a block is registered under."""

    def group_of(self, block_id: int) -> int:
        """Group that a hashed block is registered in."""


class KVCacheBlock:
    """Block `block_id` of `pool` as it is now. Equal to any view of the same block of the same pool."""

    __slots__ = ("_pool", "block_id")

    def __init__(self, pool: BlockStates, block_id: int) -> None:
        self._pool = pool
        self.block_id = block_id

    @property
    def ref_cnt(self) -> int:
        """Requests and other owners that hold the block; 0 for the null block, whose owners nobody counts."""
        return self._pool.ref_count.item(self.block_id)

    @property
    def block_hash(self) -> BlockHashWithGroupId | None:
        """Hash and group id that the block is registered under, packed, or None."""
        block_hash = self._pool.block_hash_of(self.block_id)
        if block_hash is None:
            return None
        return make_block_hash_with_group_id(block_hash, self._pool.group_of(self.block_id))

    @property
    def is_null(self) -> bool:
        """Whether this is the block that fills skipped places of tables."""
        return self.block_id == self._pool.NULL_BLOCK_ID

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KVCacheBlock):
            return NotImplemented
        return self._pool is other._pool and self.block_id == other.block_id

    def __hash__(self) -> int:
        return hash((id(self._pool), self.block_id))

    def __repr__(self) -> str:
        return (
            f"KVCacheBlock(block_id={self.block_id}, ref_cnt={self.ref_cnt}, "
            f"hashed={self.block_hash is not None}, is_null={self.is_null})"
        )


class BlockViews(Sequence[KVCacheBlock]):
    """All blocks of a pool by id; each read makes a view, but the null block has one for all."""

    __slots__ = ("_null", "_pool")

    def __init__(self, pool: BlockStates) -> None:
        self._pool = pool
        self._null = KVCacheBlock(pool, pool.NULL_BLOCK_ID)

    def _view(self, block_id: int) -> KVCacheBlock:
        return self._null if block_id == self._pool.NULL_BLOCK_ID else KVCacheBlock(self._pool, block_id)

    def __len__(self) -> int:
        return self._pool.num_blocks

    @overload
    def __getitem__(self, index: int) -> KVCacheBlock: ...
    @overload
    def __getitem__(self, index: slice) -> list[KVCacheBlock]: ...
    def __getitem__(self, index: int | slice) -> KVCacheBlock | list[KVCacheBlock]:
        ids = range(self._pool.num_blocks)[index]
        if isinstance(ids, range):
            return [self._view(block_id) for block_id in ids]
        return self._view(ids)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        return map(self._view, range(self._pool.num_blocks))
