"""What one running request does to the blocks of all groups: appends, releases, registers, shares, ends.

Flow:    SlotAllocator, StepPlanner, Forks -> [RowBlocks] -> SingleTypeKVCacheManager per spec -> BlockPool per pool
Source:  vLLM v1/core/kv_cache_coordinator.py; idle rows: ARCHITECTURE.md, "Host core"

A row of a decoding step has mostly nothing to do. `idle_until` has for each row the number of slots up to which no
group allocates, registers or releases anything for it; -1 where no request has the row.

Invariants (`check_invariants`), of `KVCacheManager`:

    M1  a block's references are its entries in all block tables, and those that copies and pins hold outside them
    M3  up to `idle_until` slots a row has nothing to allocate, register or release
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvjax.core.hashing.block_hash import BlockHash
from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.kinds.inner_copies import take_first_copy
from kvjax.core.kinds.kept_columns import take_missing
from kvjax.core.kinds.probation import forget_idle_copies, keep_checkpoint, put_on_probation
from kvjax.core.kinds.single_type_manager import SingleTypeKVCacheManager
from kvjax.core.manager.block_needs import BlockNeeds, sums
from kvjax.core.manager.copy_on_write import CopyOnWrite
from kvjax.core.manager.inner_steps import InnerSteps
from kvjax.core.manager.reservations import Reservations
from kvjax.core.requests.request import Request
from kvjax.core.requests.request_table import RequestTable
from kvjax.core.spec import NEVER, cdiv
from kvjax.errors import InvariantError, UnknownRequestError


class RowBlocks:
    """The blocks of every row of one `RequestTable`, over all groups. Owned by one `KVCacheManager`."""

    def __init__(
        self,
        groups: GroupManagers,
        needs: BlockNeeds,
        request_table: RequestTable,
        reservations: Reservations | None,
    ) -> None:
        self._groups = groups
        self._enable_caching = groups.options.enable_caching
        self._max_model_len = groups.settings.max_model_len
        self._hash_block_size = groups.hashing.hash_block_size
        self._needs = needs
        self._table = request_table
        self._reservations = reservations
        self.idle_until = np.zeros(0, np.int64)  # [rows], -1: no request
        self.num_hit_tokens = np.zeros(0, np.int64)  # [rows] tokens of the hit that a request was admitted with
        self.num_left_out = np.zeros(0, np.int64)  # [rows] first tokens of which some block lacks one: `keep_left_out`
        self.copy_on_write = CopyOnWrite(groups)
        self.inner: InnerSteps | None = None  # of models whose hits end, or states are kept, inside blocks
        if groups.has_inner_hits or any(manager.inner_states is not None for manager in groups.managers):
            self.inner = InnerSteps(groups)
        self.reserve_rows()

    def reserve_rows(self) -> None:
        """Makes every array hold the rows of the request table."""
        num_rows = self._table.capacity
        missing = num_rows - self.idle_until.size
        if missing <= 0:
            return
        self.idle_until = np.pad(self.idle_until, (0, missing), constant_values=-1)
        self.num_hit_tokens = np.pad(self.num_hit_tokens, (0, missing))
        self.num_left_out = np.pad(self.num_left_out, (0, missing))
        self.copy_on_write.reserve_rows(num_rows)
        if self._reservations is not None:
            self._reservations.reserve_rows(num_rows)
        if self._groups.retention is not None:
            self._groups.retention.reserve_rows(num_rows)
        for manager in self._groups.managers:
            manager.reserve_rows(num_rows)

    def row_of(self, request: Request) -> int:
        """The row of a request that runs here.

        Raises:
            UnknownRequestError: the manager does not hold the request.
        """
        row = request.row
        if 0 <= row < self._table.capacity and self._table.requests[row] is request:
            return row
        raise UnknownRequestError(
            f"expected a request that runs here, got {request.request_id!r}, which was freed already or never allocated"
        )

    # A new row.

    def begin(self, row: int, num_prompt_tokens: int) -> None:
        """A request with such a prompt has got the row."""
        for manager in self._groups.releasing:
            if manager.prompt_columns is not None:
                manager.prompt_columns.begin(row, num_prompt_tokens)

    def add_computed(self, row: int, hits: Sequence[np.ndarray], total_computed: int, has_external: bool) -> None:
        """Holds the hits of all groups, and only then takes blocks for tokens that come from outside.

        In this order no group's new blocks can evict another group's hit. A group whose later tokens see none of those
        from outside takes none yet.
        """
        for manager, ids in zip(self._groups.managers, self._groups.by_manager(hits), strict=True):
            manager.add_computed_blocks(row, ids, total_computed)
        if has_external:
            for manager, ids in zip(self._groups.managers, self._groups.by_manager(hits), strict=True):
                if not manager.is_prefix_cacheable:
                    continue
                num_skipped = manager.get_num_skipped_tokens(total_computed)
                take_missing(manager, row, ids.shape[1], num_skipped // manager.block_size)
                if num_skipped < total_computed:
                    manager.allocate_new_blocks(row, total_computed)

    def note_loaded(self, row: int, hits: Sequence[np.ndarray], total_computed: int) -> None:
        """Keeps the pages that have tokens from outside, behind the hits of all groups, from being zeroed."""
        for manager, ids in zip(self._groups.managers, self._groups.by_manager(hits), strict=True):
            if manager.is_prefix_cacheable:
                loaded = manager.block_tables[:, row, ids.shape[1] : manager.end_column(row, total_computed)]
                manager.block_pool.page_edits.on_loaded(loaded.ravel().tolist())

    def share(self, row: int, new_rows: np.ndarray, num_tokens: int) -> None:
        """Lets int64[n] new rows hold what a row holds of its first `num_tokens` tokens, and reserve what it has."""
        self.num_hit_tokens[new_rows], self.num_left_out[new_rows] = 0, self.num_left_out[row]
        for manager in self._groups.managers:
            manager.share_row(row, new_rows, num_tokens)
        self.keep_left_out(new_rows)
        if self._groups.retention is not None:
            self._groups.retention.share_row(row, new_rows)
        for each in [row, *new_rows.tolist()]:
            if self.copy_on_write.writes_to_its_blocks(each, num_tokens):
                self.copy_on_write.mark(each)
            self.note_idle(each)
        if self._reservations is not None:
            for new_row in new_rows.tolist():
                self._reservations.copy(row, new_row)

    # A step of a row.

    def extend(
        self,
        request: Request,
        row: int,
        settled_tokens: int,
        num_slots: int,
        num_cacheable: int,
        num_tokens: int = NEVER,
    ) -> tuple[np.ndarray, ...] | None:
        """One step of a running row: releases, appends up to `num_slots` slots, registers `num_cacheable` tokens.

        `num_tokens` are the slots without lookahead.

        Returns:
            Per group int32[k] new blocks; None if they do not fit, when only skipped blocks were released.
        """
        self.remove_skipped(row, settled_tokens)
        if self.inner is not None:
            self.inner.plan(request, row, self._table.num_computed_tokens.item(row), num_tokens)
        needs = self._needs.of_running(row, num_slots, num_tokens=num_tokens)
        new_ids = self._groups.no_ids
        if self.copy_on_write.is_marked(row):
            copies = self.copy_on_write.num_copies(row, request.num_computed_tokens)
            if not self._needs.fit(sums(needs, copies)):
                return None
            self.copy_on_write.make_exclusive(row, request.num_computed_tokens)
        if any(needs):
            if not self._needs.fit(needs):
                return None
            computed = self._table.num_computed_tokens.item(row)
            new_ids = self.allocate(row, num_slots, computed, num_tokens=num_tokens)
            for pool, ids in zip(self._groups.pool_of_group, new_ids, strict=True):
                if pool.slabs is not None and ids.size:
                    pool.slabs.note_growth(1)
        self.register(request, row, num_cacheable, num_tokens)
        self.note_idle(row)
        return new_ids

    def remove_skipped(self, row: int, settled_tokens: int) -> None:
        """Releases what left the windows of the row."""
        for manager in self._groups.releasing:
            manager.remove_skipped_blocks(row, settled_tokens)

    def allocate(
        self, row: int, num_slots: int, num_computed: int, num_encoder_tokens: int = 0, num_tokens: int = NEVER
    ) -> tuple[np.ndarray, ...]:
        """Per group int32[k] new blocks, until the row has `num_slots` slots; the encoder's are those of a new row.

        `num_computed` are the tokens that the step starts from, `num_tokens` the slots without lookahead.
        """
        new_ids = []
        most = self._groups.checkpoints_in_step
        held = [manager.num_blocks.item(row) for manager in self._groups.managers] if most else []
        for manager in self._groups.managers:
            slots = min(num_slots, num_tokens) if manager.holds_states else num_slots
            copies = take_first_copy(manager, row) if manager.first_copies else None
            ids = manager.allocate_new_blocks(row, manager.slots_of(slots, num_encoder_tokens))
            new_ids.append(ids if copies is None else np.concatenate([copies, ids], axis=1))
        if most and self._take_checkpoints(row, num_computed, min(num_slots, num_tokens)):
            new_ids = [
                manager.block_tables[:, row, first : manager.num_blocks.item(row)].copy()
                for manager, first in zip(self._groups.managers, held, strict=True)
            ]
        return self._groups.by_group(new_ids)

    def _take_checkpoints(self, row: int, num_computed: int, num_tokens: int) -> bool:
        """Takes blocks for states that a step leaves on its way to `num_tokens`, if there is room; whether it did."""
        retention, most = self._groups.retention, self._groups.checkpoints_in_step
        if retention is None or num_tokens - num_computed < 2:
            return False
        between = np.array(retention.lengths_between(num_computed, num_tokens, retention.lengths_of(row))[-most:])
        needs = [0] * len(self._groups.pools)
        for manager in self._groups.states_on_the_way:
            needs[self._groups.pools.index(manager.block_pool)] += manager.num_groups * between.size
        if not any(needs) or not self._needs.fit(needs):
            return False
        for manager in self._groups.states_on_the_way:
            manager.take_checkpoints(row, between // manager.block_size - 1)
        return True

    def cacheable_tokens(self, request: Request, row: int, num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens lie in blocks that may be registered: known and hashed."""
        if not self._enable_caching or (self._table.num_skipping and self._table.skips_registration.item(row)):
            return 0
        if self._groups.rswa_window is not None:
            num_tokens = min(num_tokens, self._table.num_prompt_tokens.item(row) + self._groups.rswa_window)
        return min(num_tokens, len(request.block_hashes) * self._hash_block_size)

    def register(self, request: Request, row: int, num_cacheable: int, num_tokens: int) -> None:
        """Registers the blocks that the first `num_cacheable` tokens fill, of a row that has computed `num_tokens`."""
        if self.inner is not None:
            self.inner.pass_over(row)
        for manager in self._groups.cacheable:
            if num_cacheable >= manager.next_full(row):
                hashes: Sequence[BlockHash] = request.block_hashes
                if manager.block_size != self._hash_block_size:
                    hashes = self._groups.hashing.of_block_size(hashes, manager.block_size)
                manager.cache_blocks(request, row, hashes, num_cacheable)
        if self.inner is not None and num_cacheable:
            self.inner.register(request, row, min(num_tokens, request.num_tokens))

    def keep_left_out(self, rows: np.ndarray) -> None:
        """Counts as registered, so that they never are, the blocks of int64[n] rows that may lack tokens."""
        if not (left_out := self.num_left_out[rows]).any():
            return
        for manager in self._groups.cacheable:
            columns = np.minimum(-(-left_out // manager.block_size), manager.num_blocks[rows])
            manager.num_cached_blocks[rows] = np.maximum(manager.num_cached_blocks[rows], columns)

    def keep_ends(self, request: Request, row: int) -> None:
        """Keeps a checkpoint where the row's registered tokens end: its answer, if it is done, or where it goes on.

        What the row's other checkpoints need and it released before counts as used now, as its last blocks are. Idle
        blocks of the contents that the row computed again, since a checkpoint behind them was gone, are forgotten.
        Blocks behind the longest hit that the row leaves are on probation.
        """
        managers, retention = self._groups.on_probation, self._groups.retention
        assert retention is not None  # it puts blocks on probation
        self._forget_copies(request, row)
        self._doubt_tails(row)
        num_registered = min(m.num_cached_blocks.item(row) * m.block_size for m in self._groups.cacheable)
        num_cached = self.cacheable_tokens(request, row, num_registered)
        own = retention.lengths_of(row)
        lengths = sorted({length for length in (*own, retention.end_of(num_cached)) if 0 < length <= num_cached})
        for manager, need in managers:
            hashes = self._groups.hashing.of_block_size(request.block_hashes, manager.block_size)
            for length in lengths:
                first, behind = need.columns_of(length)
                if length not in own or first < manager.first_live.item(row):
                    keep_checkpoint(manager, row, hashes, first, behind)

    def _forget_copies(self, request: Request, row: int) -> None:
        for manager in self._groups.cacheable:
            hashes = self._groups.hashing.of_block_size(request.block_hashes, manager.block_size)
            first = self.num_hit_tokens.item(row) // manager.block_size
            forget_idle_copies(manager, hashes, first, self._tail_start(manager, row))

    def _doubt_tails(self, row: int) -> None:
        """Puts full blocks on probation that no hit ends behind. Other blocks of their contents stay as they are."""
        for manager in self._groups.cacheable:
            tail = slice(self._tail_start(manager, row), manager.num_cached_blocks.item(row))
            if tail.start < tail.stop:
                pool, ids = manager.block_pool, manager.block_tables[:, row, tail].ravel()
                put_on_probation(pool, ids[(pool.ref_count[ids] == 1) & pool.is_hashed[ids]])

    def _tail_start(self, manager: SingleTypeKVCacheManager, row: int) -> int:
        """The column behind the longest hit that the row's registered blocks leave; kinds that forget have no tail.

        Hits are multiples of more than a block: a longer one needs blocks of a row that goes on there.
        """
        retention, num_cached = self._groups.retention, manager.num_cached_blocks.item(row)
        assert retention is not None  # `keep_ends`
        if manager.forgets or manager.block_size == retention.alignment:
            return num_cached
        longest = retention.end_of(num_cached * manager.block_size)
        num_needed = longest + self._groups.num_dropped_tokens if longest else 0
        return min(cdiv(num_needed, manager.block_size), num_cached)

    def free(self, row: int) -> None:
        """Releases all blocks of the row."""
        self.idle_until[row] = -1
        self.copy_on_write.unmark(row)
        if self._reservations is not None:
            self._reservations.release(row)
        for manager in self._groups.managers:
            manager.free(row)

    def note_idle(self, row: int) -> None:
        """Renews one row's entry of `idle_until`."""
        is_busy = self.copy_on_write.is_marked(row) or (self.inner is not None and self.inner.is_busy(row))
        idle_until = 0 if is_busy else self._max_model_len
        for manager in self._groups.managers:
            idle_until = min(idle_until, manager.row_idle_until(row))
        self.idle_until[row] = idle_until

    # Checks.

    def check_invariants(self, owned_rows: Sequence[int]) -> None:
        """Raises InvariantError if a manager's laws, M1 or M3 do not hold."""
        managers = self._groups.managers
        for manager in managers:
            manager.check_invariants(owned_rows)
        for row in owned_rows:
            if self.idle_until[row] > min(manager.row_idle_until(row) for manager in managers):
                raise InvariantError(f"M3: row {row} is idle past its next allocation, registration or release")
        for pool_id, pool in enumerate(self._groups.pools):
            owners = pool.outside_refs.counts.astype(np.int64)
            for manager, of_pool in zip(managers, self._groups.pool_ids, strict=True):
                if of_pool == pool_id:
                    owners[manager.reserved_block_ids] += 1
                    owners += np.bincount(manager.held_block_ids(), minlength=pool.num_blocks)
            wrong = np.flatnonzero(owners[1:] != pool.ref_count[1:]) + 1
            if wrong.size:
                block_id = int(wrong[0])
                raise InvariantError(
                    f"M1: pool {pool_id}, block {block_id}: {owners[block_id]} owners, "
                    f"ref_count {pool.ref_count[block_id]}"
                )


__all__ = ["RowBlocks"]
