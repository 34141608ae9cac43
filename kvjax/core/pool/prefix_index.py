"""Which blocks of a pool hold which cached prefix: a hash per block, and per group an index from hash to blocks.

Flow:    BlockPool.cache_full_blocks -> [PrefixIndex] -> prefix hits; BlockPool.get_new_blocks -> forgets on reuse
Source:  semantics of vLLM v1/core/block_pool.py

Both directions are kept: the index to find hits, the hash per block to forget it when the block is reused. Blocks of
several groups share the pool's ids but no index, so the index is keyed by raw hashes.

Invariant (`check_invariants`):

    P3  a block is registered in exactly the map of its group iff `is_hashed`, under its own hash and each further one
        (`InnerHashes`), once
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvjax.core.hashing.block_hash import BlockHash
from kvjax.core.pool.block_hash_map import BlockHashToBlockMap
from kvjax.core.pool.cache_tier import TierLink
from kvjax.core.watch.evicted_blocks import EvictedBlocks
from kvjax.errors import InvariantError

FEW_BLOCKS = 64  # of several groups: so many are forgotten faster one by one


class InnerHashes:
    """What blocks of a `PrefixIndex` have beside the hash of a full block, for prefixes that end inside them.

    A block that is registered before it is full has the hash of its first tokens as its own. One that is full keeps its
    hash and gets that of a shorter prefix as a further one. Empty unless hits end inside blocks or states are kept on
    the way; semantics of cache_partial_block in vLLM 0.33.
    """

    def __init__(self) -> None:
        self.num_tokens: dict[int, int] = {}  # of a block's own hash, where it is not that of the full block
        self.further: dict[int, list[BlockHash]] = {}  # of blocks that have more than one

    def __bool__(self) -> bool:
        return bool(self.num_tokens or self.further)

    def forget(self, block_id: int) -> list[BlockHash]:
        """A block loses all its hashes; the further ones."""
        self.num_tokens.pop(block_id, None)
        return self.further.pop(block_id, [])

    def move(self, source: int, destination: int) -> None:
        """Another block, which has none, gets what a block has."""
        if source in self.num_tokens:
            self.num_tokens[destination] = self.num_tokens.pop(source)
        if source in self.further:
            self.further[destination] = self.further.pop(source)

    def clear(self) -> None:
        """Forgets everything."""
        self.num_tokens.clear()
        self.further.clear()


class PrefixIndex:
    """Hashes of the blocks of one pool. Ids are int64 arrays of distinct blocks, checked by the pool.

    Registering and forgetting cost about 100 ns a block.
    """

    def __init__(self, num_blocks: int, group_ids: Sequence[int]) -> None:
        self.hash_maps = {group_id: BlockHashToBlockMap() for group_id in group_ids}
        self.has_groups = len(self.hash_maps) > 1  # whether blocks are registered in more than one group
        self.is_hashed = np.zeros(num_blocks, np.bool_)
        self.num_hashed = 0
        self.num_forgotten = 0  # blocks that lost their hash to reuse or eviction so far; a counter, not state
        self.num_losses = 0  # grows whenever a block loses its hash, by `clear` too
        self.evicted: EvictedBlocks | None = None  # remembers what was forgotten, where someone asks why lookups miss
        self.tier_link: TierLink | None = None  # is told of what is registered
        self._hash_of = np.full(num_blocks, None, np.object_)  # an object array is no work for the garbage collector
        self._group_of = np.full(num_blocks, group_ids[0], np.int32)  # meant where is_hashed
        self.inner = InnerHashes()

    def hash_of(self, block_id: int) -> BlockHash | None:
        """The hash that a block is registered under."""
        return self._hash_of[block_id]

    def group_of(self, block_id: int) -> int:
        """The group that a hashed block is registered in."""
        return self._group_of.item(block_id)

    def hashes_of(self, ids: np.ndarray) -> list[BlockHash]:
        """Hashes of hashed blocks."""
        return self._hash_of[ids].tolist()

    def groups_of(self, ids: np.ndarray) -> np.ndarray:  # int32[n]
        """Groups of hashed blocks."""
        return self._group_of[ids]

    def is_found(self, block_id: int) -> bool:
        """Whether a lookup of a hashed block's hash finds this block, and not another of the same hash."""
        return self.hash_maps[self.group_of(block_id)].get_one_block(self._hash_of[block_id]) == block_id

    def hashed_of(self, ids: np.ndarray) -> np.ndarray:  # int64[k]
        """The blocks that are hashed."""
        hashed = self.is_hashed[ids]
        return ids if np.count_nonzero(hashed) == len(ids) else ids[hashed]

    def have(self, ids: np.ndarray, hashes: np.ndarray) -> np.ndarray:  # bool[groups, n]
        """Which of [groups, n] blocks are registered under object[n] hashes."""
        return np.equal(self._hash_of[ids], hashes, dtype=np.object_).astype(np.bool_)

    def contents_of(self, ids: np.ndarray) -> tuple[list[BlockHash], np.ndarray]:
        """Hashes of hashed blocks, and their groups, int32[n]."""
        return self.hashes_of(ids), self.groups_of(ids)

    def first_other(self, ids: np.ndarray, block_hashes: list[BlockHash], group_id: int) -> int | None:
        """Place of the first block that is not registered under its hash in the group; None: all are."""
        if self.hashes_of(ids) == block_hashes:
            if not self.has_groups:
                return None
            others = np.flatnonzero(self._group_of[ids] != group_id)
            return None if not others.size else others.item(0)
        pairs = zip(self.hashes_of(ids), block_hashes, strict=True)
        return next(place for place, (own, given) in enumerate(pairs) if own != given)

    def register(self, ids: np.ndarray, hashes: np.ndarray, group_ids: Sequence[int]) -> None:
        """Registers blocks that are not hashed, [groups, n] with the same object[n] hashes in every group."""
        listed = hashes.tolist()
        for group_id, of_group in zip(group_ids, ids, strict=True):
            self.hash_maps[group_id].insert_n(listed, of_group)
        self._hash_of[ids] = hashes
        if self.has_groups:
            self._group_of[ids] = np.array(group_ids)[:, None]
        self.is_hashed[ids] = True
        self.num_hashed += ids.size
        if self.tier_link is not None:
            self.tier_link.after_register(ids, listed, group_ids)

    def register_few(self, block_ids: Sequence[int], block_hashes: Sequence[BlockHash], group_id: int) -> None:
        """`register` of a few blocks of one group, the null block passed over, without the cost of arrays."""
        insert, hash_of, is_hashed = self.hash_maps[group_id].insert, self._hash_of, self.is_hashed
        has_groups = self.has_groups
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            if block_id:
                insert(block_hash, block_id)
                hash_of[block_id] = block_hash
                is_hashed[block_id] = True
                self.num_hashed += 1
                if has_groups:
                    self._group_of[block_id] = group_id
        if self.tier_link is not None:
            self.tier_link.after_register(np.array([block_ids]), block_hashes, (group_id,))

    def register_inner(self, block_id: int, block_hash: BlockHash, num_tokens: int, group_id: int) -> None:
        """Registers a block under the hash of a prefix of `num_tokens` tokens that ends inside it, one it has not."""
        if self.is_hashed[block_id]:
            self.hash_maps[group_id].insert(block_hash, block_id)
            self.inner.further.setdefault(block_id, []).append(block_hash)
        else:
            self.register_few([block_id], [block_hash], group_id)
            self.inner.num_tokens[block_id] = num_tokens

    def forget_further(self, ids: np.ndarray) -> list[tuple[BlockHash, int]]:
        """Removes what hashed blocks have beside their own hashes, which `forget` then removes; hashes and groups."""
        removed = []
        for block_id in ids.tolist() if self.inner else ():
            group_id = self.group_of(block_id)
            for block_hash in self.inner.forget(block_id):
                self.hash_maps[group_id].pop(block_hash, block_id)
                removed.append((block_hash, group_id))
        return removed

    def move(self, source: int, destination: int) -> None:
        """Registers a block without a hash in the place of another, under all its hashes."""
        block_hash, group_id = self._hash_of[source], self.group_of(source)
        for each in (block_hash, *self.inner.further.get(source, ())):
            self.hash_maps[group_id].pop(each, source)
            self.hash_maps[group_id].insert(each, destination)
        self._hash_of[destination], self._hash_of[source] = block_hash, None
        self._group_of[destination] = group_id
        self.is_hashed[destination], self.is_hashed[source] = True, False
        self.inner.move(source, destination)
        self.num_losses += 1

    def forget(self, ids: np.ndarray, was_reused: bool) -> tuple[list[BlockHash], np.ndarray]:
        """Removes hashed blocks, whose contents go (`was_reused`) or stay.

        Returns:
            Their hashes and their groups, int32[n].
        """
        hashes, groups = self.contents_of(ids)
        present = set(groups.tolist()) if self.has_groups else self.hash_maps.keys()
        if len(present) == 1:
            self.hash_maps[min(present)].pop_n(hashes, ids)
        elif ids.size <= FEW_BLOCKS:
            for block_hash, group_id, block_id in zip(hashes, groups.tolist(), ids.tolist(), strict=True):
                self.hash_maps[group_id].pop(block_hash, block_id)
        else:
            for group_id in present:
                of_group = np.flatnonzero(groups == group_id)
                self.hash_maps[group_id].pop_n([hashes[i] for i in of_group.tolist()], ids[of_group])
        self._hash_of[ids] = None
        self.is_hashed[ids] = False
        self.num_hashed -= len(ids)
        self.num_forgotten += len(ids)
        self.num_losses += len(ids)
        if self.evicted is not None:
            self.evicted.add(hashes, groups.tolist(), was_reused)
        return hashes, groups

    def clear(self) -> None:
        """Forgets everything."""
        if self.evicted is not None:
            ids = np.flatnonzero(self.is_hashed)
            self.evicted.add(self._hash_of[ids].tolist(), self._group_of[ids].tolist(), was_reused=False)
        for hash_map in self.hash_maps.values():
            hash_map.clear()
        self._hash_of[:] = None
        self.is_hashed[:] = False
        self.inner.clear()
        self.num_losses += self.num_hashed
        self.num_hashed = 0

    def snapshot(self) -> dict[int, dict[bytes, tuple[int, ...]]]:
        """Group -> hash -> its blocks in the order they were registered."""
        return {group_id: hash_map.snapshot() for group_id, hash_map in self.hash_maps.items()}

    def check_invariants(self) -> None:
        """Checks P3. O(num_blocks).

        Raises:
            InvariantError: it is broken.
        """
        registered = [
            (block_id, group_id, block_hash)
            for group_id, blocks_by_hash in self.snapshot().items()
            for block_hash, block_ids in blocks_by_hash.items()
            for block_id in block_ids
        ]
        hashed = np.flatnonzero(self.is_hashed).tolist()
        own = [
            (block_id, self.group_of(block_id), block_hash)
            for block_id in hashed
            for block_hash in (self._hash_of[block_id], *self.inner.further.get(block_id, ()))
        ]
        if sorted(registered) != sorted(own) or not {*self.inner.num_tokens, *self.inner.further} <= set(hashed):
            raise InvariantError(f"P3: the index and the blocks' own hashes differ: {set(registered) ^ set(own)}")
        for group_id, blocks_by_hash in self.snapshot().items():
            num_shared = sum(len(block_ids) > 1 for block_ids in blocks_by_hash.values())
            if num_shared != self.hash_maps[group_id].num_shared:
                raise InvariantError(
                    f"P3: group {group_id} counts other than its {num_shared} hashes of several blocks"
                )
        num_own = sum(block_hash is not None for block_hash in self._hash_of)
        if not len(hashed) == self.num_hashed == num_own:
            raise InvariantError(
                f"P3: {self.num_hashed} blocks counted as hashed, {len(hashed)} marked, {num_own} have one"
            )
