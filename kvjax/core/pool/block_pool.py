"""Fixed pool of KV-cache blocks: who holds each block, what prefix it caches, and which to hand out next.

Flow:    managers -> [BlockPool] -> block ids -> block tables
Source:  semantics of vLLM v1/core/block_pool.py on arrays instead of objects; why: ARCHITECTURE.md, "Block pool"

A block is in exactly one state, and a free or held one may also be hashed (a prefix-cache hit):

    free   ref_count == 0, with the policy     -> held by get_new_blocks (which forgets its hash) or touch
    held   ref_count >= 1, not with the policy -> free by free_blocks, when its last reference goes
    null   block 0: never handed out, freed, hashed or evicted; calls that contain it skip it

An `EvictionPolicy` holds the free blocks and decides which is evicted next. Callers free blocks in eviction order, a
request's last block first.

Invariants (`check_invariants`; the tests run it after every test):

    P1  a block other than null is with the policy iff its ref_count is 0, or it lies in another pool's slab; no
        ref_count is negative
    P2  the null block is never with the policy, never hashed, and its ref_count stays 0
    P3  of `PrefixIndex`, those of the policy, E1 and E2 of `PageEdits`, O1 of `OutsideRefs`
    P4  `num_cached_free_blocks` are the blocks that are free and hashed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvjax.core.eviction import EvictionPolicyFactory, make_eviction_policy
from kvjax.core.hashing.block_hash import BlockHash
from kvjax.core.pool.block import BlockViews, KVCacheBlock
from kvjax.core.pool.block_ids import BlockIds, without_null
from kvjax.core.pool.block_origins import BlockOrigins
from kvjax.core.pool.block_pool_snapshot import BlockPoolSnapshot
from kvjax.core.pool.cache_tier import TierLink
from kvjax.core.pool.outside_refs import OutsideRefs
from kvjax.core.pool.page_edits import PageEdits
from kvjax.core.pool.prefix_index import PrefixIndex
from kvjax.core.pool.slab_provider import SlabProvider
from kvjax.core.tables.small_arrays import all_ones, any_true, count_true
from kvjax.core.watch.kv_events import BlockRemoved, GroupInfo, KVCacheEvent, KVEventLog, StoredRequest, stored_events
from kvjax.core.watch.residency_metrics import KVCacheMetricsCollector
from kvjax.errors import BlockStateError, InvariantError

FEW_BLOCKS = 6  # so many are freed faster one by one


class BlockPool:
    """Blocks 1 to num_blocks - 1 to hand out, shared by the groups `group_ids`.

    Owned by one manager, not thread-safe. Calls take ids as integer sequences and return int32 arrays; a bulk call
    costs some 10 ns a block, and about 100 ns a block where hashes are registered or forgotten. A call that raises has
    changed nothing.
    """

    NULL_BLOCK_ID = 0

    def __init__(
        self,
        num_blocks: int,
        enable_caching: bool = True,
        hash_block_size: int = 16,
        *,
        group_ids: Sequence[int] = (0,),
        enable_kv_cache_events: bool = False,
        metrics_collector: KVCacheMetricsCollector | None = None,
        free_order: str = "uncached_first",
        eviction_policy: str | EvictionPolicyFactory = "lru",
        event_log: KVEventLog | None = None,  # shared with other pools; None: the pool has its own
        track_origins: bool = False,  # remember salt, adapter and weight version of hashed blocks: 4 bytes a block
        zero_new_pages: bool = False,
        tier_link: TierLink | None = None,  # is told of cached blocks before they are reused
    ) -> None:
        if num_blocks < 2:
            raise ValueError(f"expected num_blocks >= 2 (block 0 is the null block), got {num_blocks}")
        if not group_ids or len(set(group_ids)) != len(group_ids):
            raise ValueError(f"expected distinct group ids, at least one, got {group_ids}")
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.enable_kv_cache_events = enable_kv_cache_events
        self.free_order = free_order
        self.ref_count = np.zeros(num_blocks, np.int32)
        self.outside_refs = OutsideRefs(num_blocks)  # references that stand in no block table
        self.num_cached_free_blocks = 0  # free, and still prefix-cache hits
        self.prefix_index = PrefixIndex(num_blocks, group_ids)
        policy = self.eviction_policy = make_eviction_policy(eviction_policy, self.prefix_index, free_order)
        self._tells_registrations = policy.is_told_of_use and policy.is_told_of_registrations
        self.is_hashed = self.prefix_index.is_hashed
        self.hash_maps = self.prefix_index.hash_maps
        self.origins = BlockOrigins(self.is_hashed) if track_origins else None
        self.group_infos = {group_id: GroupInfo(hash_block_size) for group_id in group_ids}
        self.num_usable_blocks = num_blocks - 1  # neither null nor taken for good
        self.slabs: SlabProvider | None = None  # None: all blocks are the pool's own
        self.num_elsewhere = 0  # blocks in free slabs, or in other pools'
        self.blocks = BlockViews(self)
        self.page_edits = PageEdits(self, zero_new_pages)
        self._ids = BlockIds(self.ref_count)
        self._residency = None if metrics_collector is None else metrics_collector.attach(num_blocks)
        self.tier_link = self.prefix_index.tier_link = tier_link
        self.event_log = KVEventLog() if event_log is None else event_log

    # -- reading ----------------------------------------------------------------------------------------------------

    @property
    def null_block(self) -> KVCacheBlock:
        """View of the block that fills skipped places of tables."""
        return self.blocks[self.NULL_BLOCK_ID]

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `get_new_blocks` can hand out, cached ones included; with slabs those that nobody holds here."""
        return self.eviction_policy.num_free + self.num_elsewhere

    def get_num_free_blocks(self) -> int:
        """`num_free_blocks`."""
        return self.eviction_policy.num_free + self.num_elsewhere

    @property
    def num_hashed_blocks(self) -> int:
        """Blocks that a prefix lookup can hit, held or free."""
        return self.prefix_index.num_hashed

    @property
    def num_evicted_blocks(self) -> int:
        """Cached blocks that ceased to be hits so far, by reuse or `evict_blocks`; a reset counts none."""
        return self.prefix_index.num_forgotten

    def get_usage(self) -> float:
        """Held share of `num_usable_blocks`, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_usable_blocks if self.num_usable_blocks else 0.0

    def block_hash_of(self, block_id: int) -> BlockHash | None:
        """Hash that a block is registered under."""
        return self.prefix_index.hash_of(block_id)

    def group_of(self, block_id: int) -> int:
        """Group that a hashed block is registered in; meaningless for others."""
        return self.prefix_index.group_of(block_id)

    def get_cached_block(self, block_hash: BlockHash, group_ids: Sequence[int]) -> list[int] | None:
        """One block of the hash per group, or None if a group has none."""
        for group_id in group_ids:
            self._check_group(group_id)
        found = [self.hash_maps[group_id].get_one_block(block_hash) for group_id in group_ids]
        return None if None in found else found  # type: ignore[return-value]

    def find_run(
        self, block_hashes: Sequence[BlockHash], group_id: int, limit: int | None = None
    ) -> np.ndarray:  # int32[k]
        """Blocks of the longest leading run of cached hashes, at most `limit` long."""
        self._check_group(group_id)
        return self.hash_maps[group_id].find_run(block_hashes, limit)

    def find_each(self, block_hashes: Sequence[BlockHash], group_id: int) -> np.ndarray:  # int32[n]
        """One block of every hash, -1 where there is none."""
        self._check_group(group_id)
        return self.hash_maps[group_id].get_many(block_hashes)

    # -- allocating and freeing -------------------------------------------------------------------------------------

    def join_slabs(self, slabs: SlabProvider, num_usable_blocks: int) -> None:
        """From now on the pool shares a memory; all blocks are elsewhere at first."""
        self.slabs = slabs
        self.num_usable_blocks = self.num_elsewhere = num_usable_blocks

    def get_new_blocks(self, num_blocks: int) -> np.ndarray:  # int32[num_blocks]
        """Takes the next blocks in eviction order with one reference each, and forgets their hashes.

        Raises:
            OutOfBlocksError: fewer are free. The pool is unchanged.
        """
        if self.slabs is not None:
            self.slabs.provide(num_blocks)
        ids = self.eviction_policy.take(num_blocks)
        if self.num_cached_free_blocks and any_true(self.is_hashed[ids]):
            hashed = self.prefix_index.hashed_of(ids)
            self.num_cached_free_blocks -= len(hashed)
            self.eviction_policy.note_evicted(hashed, self._forget_hashes(hashed))
        self.ref_count[ids] = 1
        if self.page_edits.watches:
            self.page_edits.on_new_blocks(ids.tolist())
        if self._residency is not None:
            self._residency.on_blocks_evicted(ids)
            self._residency.on_blocks_allocated(ids)
        return ids.astype(np.int32)

    def get_new_block(self) -> int:
        """`get_new_blocks` of one block, without the cost of arrays.

        Raises:
            OutOfBlocksError: no block is free. The pool is unchanged.
        """
        if self._residency is not None:
            return self.get_new_blocks(1).item()
        if self.slabs is not None:
            self.slabs.provide(1)
        block_id = self.eviction_policy.take_one()
        if self.num_cached_free_blocks and self.is_hashed.item(block_id):
            self.num_cached_free_blocks -= 1
            self.eviction_policy.note_evicted(ids := np.array([block_id]), self._forget_hashes(ids))
        self.ref_count[block_id] = 1
        if self.page_edits.watches:
            self.page_edits.on_new_blocks((block_id,))
        return block_id

    def take_for_good(self, num_blocks: int) -> np.ndarray:  # int32[num_blocks]
        """`get_new_blocks` of blocks that are never freed and do not count as usable any more; same errors."""
        ids = self.get_new_blocks(num_blocks)
        self.num_usable_blocks -= num_blocks
        return ids

    def touch(self, block_ids: npt.ArrayLike) -> None:
        """Adds one reference per occurrence of a block; free ones leave the free queue.

        Raises:
            ValueError: an id is none of the pool. The pool is unchanged.
        """
        ids = without_null(self._ids.checked(block_ids))
        distinct, repeats = self._ids.count_repeats(ids)
        counts = self.ref_count[distinct]
        free = distinct[counts == 0]
        self.eviction_policy.remove(free)
        if self.slabs is not None:
            self.slabs.note_hits(free.size)
        if self.num_cached_free_blocks:
            self.num_cached_free_blocks -= int(np.count_nonzero(self.is_hashed[free]))
        self.ref_count[distinct] = counts + repeats
        if self.eviction_policy.is_told_of_use:
            self.eviction_policy.note_hit(distinct)
        if self.tier_link is not None:
            self.tier_link.note_use(distinct)
        if self._residency is not None:
            self._residency.on_blocks_accessed(ids)

    def free_blocks(self, block_ids_in_eviction_order: npt.ArrayLike) -> None:
        """Drops one reference per occurrence of a block; a block becomes free where its last reference goes.

        Raises:
            ValueError: an id is none of the pool. The pool is unchanged.
            BlockStateError: a block has fewer references than occurrences. The pool is unchanged.
        """
        self._free_shared(without_null(self._ids.checked(block_ids_in_eviction_order)))

    def free_held(self, ids: np.ndarray) -> None:  # integer[n], or [groups, n]: one group after the other
        """`free_blocks` without checks: none is null, and the caller holds a reference for each time one is listed.

        So a block with one reference is listed once. Of blocks that go to the head, the last group's come first.
        """
        if ids.shape[-1] <= FEW_BLOCKS:
            for few in ids.tolist() if ids.ndim == 2 else (ids.tolist(),):
                self._free_few(few)
        elif ids.ndim == 1 or self.eviction_policy.joins_releases:
            self._free_many(ids.ravel().astype(np.int64, copy=False))
        else:
            for of_group in ids.astype(np.int64, copy=False):
                self._free_many(of_group)

    def _free_few(self, ids: list[int]) -> None:
        """One by one, without the cost of arrays."""
        freed, num_hashed, ref_count, is_hashed = [], 0, self.ref_count, self.is_hashed.item
        for block_id in ids:
            ref_count[block_id] = count = ref_count.item(block_id) - 1
            if not count:
                freed.append(block_id)
                num_hashed += is_hashed(block_id)
        self.eviction_policy.release_few(freed, num_hashed)
        self.num_cached_free_blocks += num_hashed
        if self.tier_link is not None:
            self.tier_link.last_used[freed] = self.tier_link.clock

    def _free_many(self, ids: np.ndarray) -> None:  # int64[n]
        if all_ones(self.ref_count[ids]):
            self.ref_count[ids] = 0
            self._release(ids)
        else:
            self._free_shared(ids)

    def _free_shared(self, ids: np.ndarray) -> None:
        """`free_blocks` where blocks may keep references or occur more than once."""
        distinct, repeats = self._ids.count_repeats(ids)
        before = self.ref_count[distinct]
        counts = before - repeats
        if counts.size and counts.min() < 0:
            bad = int(np.argmax(counts < 0))
            given = repeats if isinstance(repeats, int) else int(repeats[bad])
            raise BlockStateError(
                f"block {distinct[bad]} has {before[bad]} references, {given} freed; free each reference once"
            )
        self.ref_count[distinct] = counts
        self._release(distinct[counts == 0])

    def _release(self, ids: np.ndarray) -> None:
        """Gives int64[n] distinct blocks without references to the policy."""
        is_hashed = self.is_hashed[ids]
        self.eviction_policy.release_known(ids, is_hashed)
        self.num_cached_free_blocks += count_true(is_hashed)
        if self.tier_link is not None:
            self.tier_link.last_used[ids] = self.tier_link.clock

    # -- the prefix cache -------------------------------------------------------------------------------------------

    def register_group(self, group_id: int, info: GroupInfo) -> None:
        """Says what KV events tell about a group.

        Raises:
            ValueError: the pool does not serve the group. The pool is unchanged.
        """
        self._check_group(group_id)
        self.group_infos[group_id] = info

    def cache_full_blocks(
        self,
        request: StoredRequest,
        block_ids: npt.ArrayLike,  # int32[k]: the request's blocks first_block, first_block + 1, ...
        block_hashes: Sequence[BlockHash],  # the request's, at the group's block size, from its block 0 on
        first_block: int,
        group_id: int,
    ) -> None:
        """Makes full blocks of a request prefix-cache hits, null blocks excepted; emits a BlockStored per run.

        Raises:
            ValueError: a block has no hash yet, or an id or group is none of the pool. The pool is unchanged.
            BlockStateError: a block is free, hashed already or given twice. The pool is unchanged.
        """
        ids = self._ids.checked(block_ids)
        hashes = block_hashes[first_block : first_block + len(ids)]
        _check_aligned(ids, hashes)
        real = np.flatnonzero(ids)
        if len(real) < len(ids):
            ids, hashes = ids[real], [hashes[i] for i in real.tolist()]
        self._register(ids, hashes, real + first_block, group_id)
        if self.enable_kv_cache_events:
            info = self.group_infos[group_id]
            self.event_log.extend(stored_events(request, block_hashes, real + first_block, group_id, info))

    def register_many(
        self,
        block_ids: npt.ArrayLike,
        block_hashes: Sequence[BlockHash],
        group_id: int,
        columns: npt.ArrayLike = 0,  # which block of its request each is, for policies that weigh it
    ) -> None:
        """Makes one full block (not null) of each of many requests a prefix-cache hit.

        Raises:
            ValueError: KV events are on (they need each request: use `cache_full_blocks`), or as there.
            BlockStateError: as `cache_full_blocks`. The pool is unchanged.
        """
        if self.enable_kv_cache_events:
            raise ValueError("expected cache_full_blocks per request while KV events are on, got register_many")
        ids = self._ids.checked(block_ids)
        _check_aligned(ids, block_hashes)
        self._register(ids, block_hashes, np.broadcast_to(columns, ids.shape), group_id)

    def register_rows(
        self, block_ids: np.ndarray, block_hashes: np.ndarray, columns: np.ndarray, group_ids: Sequence[int]
    ) -> None:
        """`register_many` of int32[groups, n] blocks under the same n hashes, an array of objects, unchecked.

        For the owner of block tables, who knows its blocks to be held, distinct, not null and not hashed. The groups
        are of one block size.
        """
        self.prefix_index.register(block_ids, block_hashes, group_ids)
        if self._tells_registrations:
            block_size = self.group_infos[group_ids[0]].block_size
            starts = np.broadcast_to(columns * block_size, block_ids.shape)
            self.eviction_policy.note_registered(block_ids.ravel().astype(np.int64), starts.ravel(), block_size)

    def register_few(
        self, block_ids: Sequence[int], block_hashes: Sequence[BlockHash], first_column: int, group_id: int
    ) -> None:
        """`register_rows` of a few blocks of one row and group, null ones passed over, without the cost of arrays."""
        self.prefix_index.register_few(block_ids, block_hashes, group_id)
        if self._tells_registrations:
            block_size = self.group_infos[group_id].block_size
            ids = np.array(block_ids, np.int64)
            real = ids.nonzero()[0]
            self.eviction_policy.note_registered(ids[real], (real + first_column) * block_size, block_size)

    def cache_inner(
        self,
        request: StoredRequest,
        block_id: int,
        block_hashes: Sequence[BlockHash],  # the request's, at `hash_block_size`
        num_tokens: int,
        group_id: int,
        replaces: bool = False,
    ) -> None:
        """Makes a held block a hit of the request's first `num_tokens` tokens, which end inside it.

        What the block was registered under for fewer tokens of a block that was not full is forgotten, with
        `replaces` all that it was registered under: then it holds something else.
        """
        unit, inner = self.hash_block_size, self.prefix_index.inner
        block_hash = block_hashes[num_tokens // unit - 1]
        if not replaces and self.hash_maps[group_id].contains(block_hash, block_id):
            return
        if replaces or inner.num_tokens.get(block_id, num_tokens) < num_tokens:
            self.evict_blocks([block_id])
        self.prefix_index.register_inner(block_id, block_hash, num_tokens, group_id)
        if self.enable_kv_cache_events:
            info = replace(self.group_infos[group_id], block_size=unit)
            self.event_log.extend(
                stored_events(request, block_hashes, np.array([num_tokens // unit - 1]), group_id, info)
            )

    def move_hashes(self, source: int, destination: int) -> None:
        """A held block without a hash is registered in the place of another held one; nothing if that is not."""
        if self.is_hashed[source]:
            self.prefix_index.move(source, destination)

    def evict_blocks(self, block_ids: npt.ArrayLike, was_reused: bool = False) -> None:
        """Forgets the hashes of blocks; who holds them stays, and under "lru" the free order.

        `was_reused`: who holds them writes other contents there, which `MissReasons` tells from dropping them.

        Raises:
            ValueError: an id is none of the pool. The pool is unchanged.
        """
        ids, _ = self._ids.count_repeats(without_null(self._ids.checked(block_ids)))
        ids = self.prefix_index.hashed_of(ids)
        self._evict_hashed(ids, int(np.count_nonzero(self.ref_count[ids] == 0)), was_reused)
        if self.eviction_policy.is_told_of_use:
            self.eviction_policy.note_forgotten(ids)

    def evict_free(self, ids: np.ndarray) -> None:
        """`evict_blocks` of int64[n] distinct free blocks, to be reused; for who tells the policy, and has done so."""
        ids = self.prefix_index.hashed_of(ids)
        self._evict_hashed(ids, ids.size, was_reused=True)

    def forget_doubtful(self, block_ids: np.ndarray, block_hashes: np.ndarray) -> None:
        """Blocks, int32[groups, n], lose the object[n] hashes that nobody asked for, where they have them.

        A block stays as it is if somebody holds it, if it has another hash or none, or if it is not on probation.
        """
        is_idle = self.prefix_index.have(block_ids, block_hashes) & (self.ref_count[block_ids] == 0)
        ids = block_ids[is_idle].astype(np.int64)
        self.evict_blocks(ids[self.eviction_policy.are_on_probation(ids)])

    def _evict_hashed(self, ids: np.ndarray, num_free: int, was_reused: bool) -> None:
        """int64[n] hashed blocks, so many of them free, are hits no more."""
        self.num_cached_free_blocks -= num_free
        self._forget_hashes(ids, was_reused)
        if self._residency is not None:
            self._residency.on_blocks_evicted(ids)

    def reset_prefix_cache(self) -> bool:
        """Forgets all hashes (new weights make them wrong). False, and no change, while any block is held."""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        hashed = np.flatnonzero(self.is_hashed)
        self.prefix_index.clear()
        self.num_cached_free_blocks = 0
        if self.eviction_policy.is_told_of_use:
            self.eviction_policy.note_forgotten(hashed)
        if self._residency is not None:
            self._residency.reset()
        if self.enable_kv_cache_events:
            self.event_log.note_cleared()
        return True

    def take_events(self) -> list[KVCacheEvent]:
        """The events since the last call, oldest first, with those of the pools that share the log."""
        return self.event_log.take()

    def _register(self, ids: np.ndarray, hashes: Sequence[BlockHash], columns: np.ndarray, group_id: int) -> None:
        self._check_group(group_id)
        if not self.enable_caching:
            raise ValueError("expected a pool with enable_caching=True to register hashes, got one without")
        self._check_registrable(ids)
        self.register_rows(ids[None], np.fromiter(hashes, np.object_, len(hashes)), columns, (group_id,))

    def _check_registrable(self, ids: np.ndarray) -> None:
        hashed = self.is_hashed[ids]
        if hashed.any():
            raise BlockStateError(f"block {ids[hashed][0]} is hashed already; a full block is registered once")
        held = self.ref_count[ids] > 0
        if not held.all():
            raise BlockStateError(f"block {ids[~held][0]} is free or null; only held blocks are registered")
        distinct, repeats = self._ids.count_repeats(ids)
        if len(distinct) != len(ids):
            raise BlockStateError(f"block {distinct[np.argmax(repeats)]} is given {np.max(repeats)} times")

    def _forget_hashes(self, ids: np.ndarray, was_reused: bool = True) -> list[BlockHash]:
        """Removes hashed, distinct blocks from the index; the hashes that they had."""
        if not len(ids):
            return []
        if was_reused and self.tier_link is not None:
            self.tier_link.before_reuse(ids, *self.prefix_index.contents_of(ids))
        further = self.prefix_index.forget_further(ids)
        hashes, groups = self.prefix_index.forget(ids, was_reused)
        if self.enable_kv_cache_events:
            removed = [*zip(hashes, groups.tolist(), strict=True), *further]
            self.event_log.extend(BlockRemoved((h,), group_idx=g) for h, g in removed)
        return hashes

    def _check_group(self, group_id: int) -> None:
        if group_id not in self.hash_maps:
            raise ValueError(f"expected a group of {tuple(self.hash_maps)}, got {group_id}")

    # -- for people and tests ---------------------------------------------------------------------------------------

    def snapshot(self) -> BlockPoolSnapshot:
        """The whole state as values. O(num_blocks)."""
        return BlockPoolSnapshot(
            free_order=tuple(self.eviction_policy.order().tolist()),
            ref_count=tuple(self.ref_count.tolist()),
            blocks_by_hash=self.prefix_index.snapshot(),
            page_edits=self.page_edits.snapshot(),
            policy_state=self.eviction_policy.state(),
            origins=None if self.origins is None else self.origins.snapshot(),
        )

    def check_invariants(self) -> None:
        """Checks P1 to P4 and the policy. O(num_blocks).

        Raises:
            InvariantError: one of them is broken.
        """
        self.eviction_policy.check_invariants()
        self.prefix_index.check_invariants()
        self.page_edits.check_invariants()
        self.outside_refs.check_invariants()
        null = self.NULL_BLOCK_ID
        is_free = np.isin(np.arange(self.num_blocks), self.eviction_policy.order())
        if is_free[null] or self.is_hashed[null] or self.ref_count[null] != 0:
            raise InvariantError(f"P2: the null block is queued, hashed or counted ({self.ref_count[null]} references)")
        num_free = self.eviction_policy.num_free
        if np.count_nonzero(is_free) != num_free:
            raise InvariantError(f"P1: {num_free} blocks counted as free, {np.count_nonzero(is_free)} are")
        num_cached = int(np.count_nonzero(is_free & self.is_hashed))
        if num_cached != self.num_cached_free_blocks:
            raise InvariantError(f"P4: {self.num_cached_free_blocks} free blocks counted as cached, {num_cached} are")
        is_wrong = is_free & (self.ref_count != 0) if self.slabs is not None else is_free != (self.ref_count == 0)
        broken = np.flatnonzero(is_wrong | (self.ref_count < 0))
        if (broken != null).any():
            block_id = broken[broken != null][0]
            raise InvariantError(
                f"P1: block {block_id} has {self.ref_count[block_id]} references, queued: {is_free[block_id]}"
            )

    def describe(self) -> str:
        """A few lines for a person."""
        held = self.num_usable_blocks - self.num_free_blocks
        following = self.eviction_policy.order()[:8].tolist()
        return (
            f"pool of {self.num_blocks} blocks (null block included), groups {tuple(self.hash_maps)}, "
            f"{type(self.eviction_policy).__name__}, free order {self.free_order}, prefix caching "
            f"{'on' if self.enable_caching else 'off'}{self.eviction_policy.describe()}\n"
            f"  held    {held} ({self.get_usage():.1%}), {np.count_nonzero(self.ref_count > 1)} of them shared\n"
            f"  free    {self.num_free_blocks}, {self.num_cached_free_blocks} of them cached; next {following}\n"
            f"  hashed  {self.num_hashed_blocks}, {sum(map(len, self.hash_maps.values()))} distinct hashes"
        )


def _check_aligned(ids: np.ndarray, hashes: Sequence[BlockHash]) -> None:
    if len(hashes) != len(ids):
        raise ValueError(f"expected a hash for each of {len(ids)} blocks, got {len(hashes)}")
