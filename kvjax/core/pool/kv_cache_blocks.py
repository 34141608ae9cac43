"""Block ids that a lookup found or that were allocated, one array per group.

Flow:    KVCacheManager -> [KVCacheBlocks] -> the scheduler, and back into `allocate_slots` as a hit
Source:  the value of the same name in vLLM v1/core/kv_cache_manager.py

The arrays are the value; `KVCacheBlock` objects appear only where someone reads `.blocks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

if TYPE_CHECKING:
    from kvjax.core.hashing.block_hash import BlockHash
    from kvjax.core.pool.block import KVCacheBlock
    from kvjax.core.pool.block_pool import BlockPool

NO_BLOCK_IDS = np.empty(0, np.int32)
NO_BLOCK_IDS.setflags(write=False)


class BlockSequence(Sequence["KVCacheBlock"]):
    """One group's blocks as a read-only sequence of views. Equal to any sequence of blocks of equal pool and id."""

    __slots__ = ("_block_ids", "_pool")

    def __init__(self, pool: BlockPool, block_ids: np.ndarray) -> None:
        self._pool = pool
        self._block_ids = block_ids  # int32[k]

    def __len__(self) -> int:
        return int(self._block_ids.size)

    @overload
    def __getitem__(self, index: int) -> KVCacheBlock: ...
    @overload
    def __getitem__(self, index: slice) -> BlockSequence: ...
    def __getitem__(self, index: int | slice) -> KVCacheBlock | BlockSequence:
        if isinstance(index, slice):
            return BlockSequence(self._pool, self._block_ids[index])
        return self._pool.blocks[int(self._block_ids[index])]

    def __iter__(self) -> Iterator[KVCacheBlock]:
        blocks = self._pool.blocks
        return (blocks[block_id] for block_id in self._block_ids.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BlockSequence) and other._pool is self._pool:
            return np.array_equal(self._block_ids, other._block_ids)
        if isinstance(other, Sequence) and not isinstance(other, str | bytes):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"BlockSequence({self._block_ids.tolist()})"


class FoundHit(NamedTuple):
    """What a hit was found for, and when: until a block loses its hash, it is good for a request of these hashes."""

    block_hashes: list[BlockHash]  # the request's own list
    num_tokens: int
    num_losses: int  # of all pools at the lookup


class ElsewhereBlocks(NamedTuple):
    """Blocks of one group behind a hit, in table order, that are to be loaded."""

    first_column: int  # of the group's table
    block_hashes: tuple[BlockHash, ...]
    block_ids: np.ndarray  # int32 of each: where the pool has it too, until it is reused; -1: only the tier


class ElsewhereHit(NamedTuple):
    """What makes a hit longer once it is loaded."""

    num_tokens: int  # behind the hit: give them as `num_external_computed_tokens`
    blocks: tuple[ElsewhereBlocks, ...]  # per group


class KVCacheBlocks:
    """Block ids of every group, in table order. A value: nobody writes into the arrays, into a lookup's nobody can.

    A lookup's answer also says what it was found for, how long the hit would be, had groups with checkpoints
    (`retention_interval`) had one there, and what of it lies in a tier; equality does not look at these.
    """

    __slots__ = ("block_ids", "elsewhere", "found", "num_shared_tokens", "pools")

    def __init__(
        self,
        block_ids: tuple[np.ndarray, ...],
        pools: tuple[BlockPool, ...],
        num_shared_tokens: int = 0,
        found: FoundHit | None = None,
        elsewhere: ElsewhereHit | None = None,
    ) -> None:
        self.block_ids = block_ids  # per group int32[k]
        self.pools = pools  # per group, the pool of its ids
        self.num_shared_tokens = num_shared_tokens  # 0 where that is no longer than the hit
        self.found = found  # None: no lookup's answer
        self.elsewhere = elsewhere  # None: nothing that a tier holds makes the hit longer

    @property
    def blocks(self) -> tuple[BlockSequence, ...]:
        """Per group the blocks as views of their pool's state, made when read."""
        return tuple(BlockSequence(pool, ids) for pool, ids in zip(self.pools, self.block_ids, strict=True))

    @property
    def num_blocks(self) -> int:
        """Blocks over all groups, null blocks included."""
        return sum(ids.size for ids in self.block_ids)

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Per group, or each of `group_ids`, the ids as ints; None if `allow_none` and there are none."""
        chosen = self.block_ids if group_ids is None else [self.block_ids[group_id] for group_id in group_ids]
        if allow_none and not any(ids.size for ids in chosen):
            return None
        return tuple(ids.tolist() for ids in chosen)

    def get_unhashed_block_ids(self) -> list[int]:
        """Ids of the one group's blocks that have no hash (a connector has yet to fill them).

        Raises:
            ValueError: there is more than one group.
        """
        if len(self.block_ids) != 1:
            raise ValueError(f"expected one KV-cache group, got {len(self.block_ids)}; read `block_ids` instead")
        return self.get_unhashed_block_ids_all_groups()[0]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Per group the ids of the blocks that have no hash, null blocks left out."""
        pairs = zip(self.pools, self.block_ids, strict=True)
        return [ids[~pool.is_hashed[ids] & (ids != 0)].tolist() for pool, ids in pairs]

    def new_empty(self) -> KVCacheBlocks:
        """A value of the same groups without blocks."""
        return KVCacheBlocks((NO_BLOCK_IDS,) * len(self.block_ids), self.pools)

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        """Per group, these blocks and then the other's.

        Raises:
            ValueError: the two are not of the same groups.
        """
        if other.pools != self.pools:
            raise ValueError("expected blocks of the same manager's groups, got blocks of other pools")
        joined = (np.concatenate(pair) for pair in zip(self.block_ids, other.block_ids, strict=True))
        return KVCacheBlocks(tuple(joined), self.pools)

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, KVCacheBlocks):
            return NotImplemented
        return self.pools == other.pools and all(
            np.array_equal(a, b) for a, b in zip(self.block_ids, other.block_ids, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"KVCacheBlocks({', '.join(str(ids.tolist()) for ids in self.block_ids)})"
