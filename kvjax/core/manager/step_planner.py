"""One step of all running requests as vector operations, equal to a sequence of `allocate_slots` calls.

Flow:    rows + new tokens, in scheduling order -> [StepPlanner.plan] -> block tables, prefix cache, StepResult
Source:  ARCHITECTURE.md, "Planning a step": why bulk equals sequential

Most rows of a decoding step have nothing to do: `RowBlocks.idle_until` tells which in a few operations.
The rest are planned in stretches, each as

    1  release what left the windows          row by row, managers inner, groups inner
    2  allocate all new blocks at once        for the rows in that order
    3  register the blocks that filled        rows in order, group by group

A row that shares a partly filled block since a fork is planned alone, and every row where blocks are registered before
they are full.

This equals the row-by-row sequence while a stretch's blocks come from those free before its own releases, and no
release goes to the head of the free queue; each eviction policy says how many rows that holds for (`bulk_equivalent`).
A row that begins no stretch is planned alone, and the first that does not fit ends the step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvjax.core.eviction import StepFlow
from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.manager.block_registrar import BlockRegistrar
from kvjax.core.manager.reservations import Reservations
from kvjax.core.manager.row_blocks import RowBlocks
from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.pool.kv_cache_blocks import NO_BLOCK_IDS
from kvjax.core.requests.request_table import RequestTable
from kvjax.core.step.step_plan import StepResult, TableUpdate
from kvjax.core.tables.column_runs import merge, split
from kvjax.core.tables.row_changes import RowChanges
from kvjax.core.tables.token_counts import as_counts

NO_UPDATE = TableUpdate(np.empty(0, np.int64), np.empty(0, np.int64), NO_BLOCK_IDS)
Updates = list[list[TableUpdate]]  # per group, in the order of allocation


class StepWork(NamedTuple):
    """The n rows of a step that have something to do, in scheduling order, and what it is."""

    rows: np.ndarray  # int64[n]
    settled_tokens: np.ndarray  # int64[n] computed tokens that can not be taken back; any where no kind looks
    num_tokens: np.ndarray  # int64[n] slots without lookahead
    num_slots: np.ndarray  # int64[n]
    num_cacheable: np.ndarray  # int64[n] tokens whose full blocks may be registered
    changes: list[RowChanges]  # per manager

    def part(self, start: int, end: int) -> StepWork:
        """The rows from `start` to `end`."""
        if start == 0 and end == self.rows.size:
            return self
        return StepWork(
            self.rows[start:end],
            self.settled_tokens[start:end],
            self.num_tokens[start:end],
            self.num_slots[start:end],
            self.num_cacheable[start:end],
            [changes.part(start, end) for changes in self.changes],
        )


class StepPlanner:
    """Plans steps over all groups. Owned by one `KVCacheManager`."""

    def __init__(
        self,
        groups: GroupManagers,
        rows: RowBlocks,
        registrar: BlockRegistrar,
        request_table: RequestTable,
        reservations: Reservations | None,
    ) -> None:
        self._groups = groups
        self._rows = rows
        self._registrar = registrar
        self._table = request_table
        self._reservations = reservations
        self._max_model_len = groups.settings.max_model_len
        self._managers = groups.managers
        self._good_rows = b""  # the last rows that were found distinct and in range; the table only grows
        self._no_updates = (NO_UPDATE,) * groups.num_groups
        self._managers_of_pool = [
            [(i, m.num_groups) for i, m in enumerate(groups.managers) if groups.pool_ids[i] == pool_id]
            for pool_id in range(len(groups.pools))
        ]  # per pool: index of a manager, its groups

    def plan(
        self,
        rows: npt.ArrayLike,
        num_new_tokens: npt.ArrayLike,
        num_lookahead_tokens: npt.ArrayLike,
        num_in_flight_tokens: npt.ArrayLike,
        delay_cache_blocks: bool,
    ) -> StepResult:
        """`KVCacheManager.plan_step`."""
        index, idle_until = self._checked_rows(rows)
        new = as_counts("num_new_tokens", num_new_tokens, index, least=1)
        lookahead = as_counts("num_lookahead_tokens", num_lookahead_tokens, index, least=0)
        in_flight = as_counts("num_in_flight_tokens", num_in_flight_tokens, index, least=0)
        if not index.size:
            return StepResult(0, self._no_updates)
        computed = self._table.num_computed_tokens[index]
        after = computed + new
        num_slots = after + lookahead if not isinstance(lookahead, int) or lookahead else after
        active = (num_slots > idle_until).nonzero()[0]
        if not active.size:
            return StepResult(index.size, self._no_updates)
        rows_of_work, after_work = index[active], after[active]
        slots_of_work = after_work if num_slots is after else np.minimum(num_slots[active], self._max_model_len)
        self._check_active(rows_of_work, after_work)
        settled = after_work  # nobody looks where nothing is released, reserved or a state
        if self._groups.releasing or self._reservations is not None or self._groups.state_steps:
            settled = computed[active]
            if self._groups.state_steps:
                self._groups.state_steps.check_step_ends(settled, after_work)
            for manager in self._groups.rings:
                manager.check_rings(rows_of_work, settled, after_work)
            if not isinstance(in_flight, int) or in_flight:
                settled = np.maximum(settled - _at(in_flight, active), 0)
        if self._reservations is not None:
            self._reservations.check_rows(rows_of_work, slots_of_work, settled)
        work = self._work(rows_of_work, after_work, slots_of_work, settled, delay_cache_blocks)
        num_done, updates = self._plan_work(work)
        return StepResult(index.size if num_done == active.size else int(active[num_done]), updates)

    def _checked_rows(self, rows: npt.ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """`rows` as int64[n], in range and distinct, and their entries of `idle_until`."""
        index = np.asarray(rows)
        if index.ndim != 1 or (index.size and index.dtype.kind not in "iu"):
            raise ValueError(f"expected rows as a row of integers, got {index.dtype}{list(index.shape)}")
        index = index.astype(np.int64, copy=False)
        idle_until = self._rows.idle_until
        if not index.size:
            return index, idle_until[:0]
        key = index.tobytes()
        if key == self._good_rows:
            return index, idle_until[index]
        if np.maximum.reduce(index.view(np.uint64)) >= idle_until.size:  # a negative row is a huge one
            bad = index[(index < 0) | (index >= idle_until.size)]
            raise ValueError(f"expected rows that a request owns, got row {bad[0]}")
        if np.maximum.reduce(np.bincount(index)) > 1:
            raise ValueError(f"expected distinct rows, got {index.tolist()}")
        self._good_rows = key
        return index, idle_until[index]

    def _check_active(self, rows: np.ndarray, after: np.ndarray) -> None:
        """Checks what cannot be wrong with a idle row: that a request has it, and that its length is allowed."""
        idle_until = self._rows.idle_until[rows]
        if np.minimum.reduce(idle_until) < 0:
            raise ValueError(f"expected rows that a request owns, got row {rows[idle_until.argmin()]}")
        if np.maximum.reduce(after) > self._max_model_len:
            row, limit = rows[after.argmax()], self._max_model_len
            raise ValueError(f"row {row}: expected at most max_model_len = {limit} tokens, got {after.max()}")

    def _work(
        self,
        rows: np.ndarray,
        after: np.ndarray,
        num_slots: np.ndarray,
        settled: np.ndarray,
        delay_cache_blocks: bool,
    ) -> StepWork:
        num_cacheable = np.zeros_like(after) if delay_cache_blocks else self._registrar.cacheable_tokens(rows, after)
        changes = [
            manager.plan_rows(rows, settled, after if manager.holds_states else num_slots, num_cacheable)
            for manager in self._managers
        ]
        return StepWork(rows, settled, after, num_slots, num_cacheable, changes)

    def _plan_work(self, work: StepWork) -> tuple[int, tuple[TableUpdate, ...]]:
        """Plans rows until one does not fit; how many did, and what was written per group."""
        num_rows = work.rows.size
        updates: Updates = [[] for _ in self._no_updates]
        num_done = 0
        while num_done < num_rows:
            rest = work.part(num_done, num_rows)
            length = self._stretch_length(rest)
            if length:
                self._plan_stretch(rest.part(0, length), updates)
            elif self._plan_one(rest, updates):
                length = 1
            else:
                break
            num_done += length
        return num_done, tuple([_joined(parts) for parts in updates])

    # -- where a stretch ends ---------------------------------------------------------------------------------------

    def _stretch_length(self, work: StepWork) -> int:
        """Rows of the longest leading stretch for which bulk equals sequential; 0: there is none."""
        if self._rows.inner is not None:
            return 0
        length = work.rows.size
        if self._rows.copy_on_write.num_sharing:
            sharing = self._rows.copy_on_write.is_sharing[work.rows]
            length = int(sharing.argmax()) if sharing.any() else length
        if self._groups.checkpoints_in_step:
            length = min(length, self._rows_without_checkpoints(work))
        for pool, of_pool in zip(self._groups.pools, self._managers_of_pool, strict=True):
            parts = [(self._managers[i].block_tables, work.changes[i]) for i, _ in of_pool]
            flow = StepFlow(work.rows.size, parts)
            length = min(length, pool.eviction_policy.bulk_equivalent(flow))
        return length

    def _rows_without_checkpoints(self, work: StepWork) -> int:
        """How many rows come before the first that leaves a state on its way."""
        computed, retention = self._table.num_computed_tokens[work.rows], self._groups.retention
        assert retention is not None  # there are checkpoints
        for i in (work.num_tokens - computed > 1).nonzero()[0].tolist():
            lengths = retention.lengths_of(work.rows.item(i))
            if retention.lengths_between(computed.item(i), work.num_tokens.item(i), lengths):
                return i
        return work.rows.size

    # -- planning a stretch -----------------------------------------------------------------------------------------

    def _plan_stretch(self, work: StepWork, updates: Updates) -> None:
        for pool, of_pool in zip(self._groups.pools, self._managers_of_pool, strict=True):
            self._release(work, pool, of_pool)
            self._allocate(work, pool, of_pool, updates)
        idle_until = work.changes[0].idle_until
        for manager, changes in zip(self._managers, work.changes, strict=True):
            if changes.filled.num_columns:
                self._registrar.register(manager, changes.filled, work.num_cacheable)
            manager.note_changes(work.rows, changes)
            if changes.idle_until is not idle_until:
                idle_until = np.minimum(idle_until, changes.idle_until)
        self._rows.idle_until[work.rows] = idle_until

    def _release(self, work: StepWork, pool: BlockPool, of_pool: list[tuple[int, int]]) -> None:
        """Gives back what left the windows, of one pool's managers."""
        detached, runs, is_dense = [], [], True
        for i, _ in of_pool:
            skipped = work.changes[i].skipped
            if skipped.num_columns:
                is_dense &= not self._managers[i].holds_states
                detached.append(self._managers[i].detach(skipped))
                runs.append(skipped)
        if runs:
            ids = merge(detached, runs, work.rows.size).astype(np.int64)
            pool.free_held(ids if is_dense else ids[ids != 0])

    def _allocate(self, work: StepWork, pool: BlockPool, of_pool: list[tuple[int, int]], updates: Updates) -> None:
        """Allocates the new blocks of one pool's managers at once and gives each row its own."""
        managers, runs, groups, num_new, num_grown = [], [], [], 0, 0
        for i, num_groups in of_pool:
            needed = work.changes[i].needed
            if needed.num_columns:
                managers.append(self._managers[i])
                runs.append(needed)
                groups.append(num_groups)
                num_new += needed.num_columns * num_groups
                num_grown += needed.positions.size * num_groups
        if not runs:
            return
        shares = split(pool.get_new_blocks(num_new), runs, groups, work.rows.size)
        if pool.slabs is not None:
            pool.slabs.note_growth(num_grown)
        for manager, run, block_ids in zip(managers, runs, shares, strict=True):
            rows, columns = run.entries()
            rows, columns, block_ids = manager.attach(rows, columns, block_ids)
            for group_id, ids in zip(manager.group_ids, block_ids, strict=True):
                updates[group_id].append(TableUpdate(rows, columns, ids))

    # -- planning one row -------------------------------------------------------------------------------------------

    def _plan_one(self, work: StepWork, updates: Updates) -> bool:
        """The first row, or False: it does not fit."""
        row = work.rows.item(0)
        request = self._table.requests[row]
        assert request is not None  # the rows were checked
        firsts = self._groups.by_group([[m.num_blocks.item(row)] * m.num_groups for m in self._managers])
        is_sharing = self._rows.copy_on_write.is_sharing[row]
        before = self._groups.row_block_ids(row) if is_sharing else self._groups.no_ids
        new_ids = self._rows.extend(
            request,
            row,
            work.settled_tokens.item(0),
            work.num_slots.item(0),
            work.num_cacheable.item(0),
            work.num_tokens.item(0),
        )
        if new_ids is None:
            return False
        if is_sharing:
            self._note_copies(row, before, updates)
        for parts, first, ids in zip(updates, firsts, new_ids, strict=True):
            if ids.size:
                parts.append(TableUpdate(np.full(ids.size, row), np.arange(first, first + ids.size), ids))
        return True

    def _note_copies(self, row: int, before: tuple[np.ndarray, ...], updates: Updates) -> None:
        """Tells of the blocks of the row that copies took the place of."""
        for parts, old, now in zip(updates, before, self._groups.row_block_ids(row), strict=True):
            columns = ((now[: old.size] != old) & (now[: old.size] != 0)).nonzero()[0]
            if columns.size:
                parts.append(TableUpdate(np.full(columns.size, row), columns, now[columns]))


def _at(values: np.ndarray | int, index: np.ndarray) -> np.ndarray | int:
    return values if isinstance(values, int) else values[index]


def _joined(parts: list[TableUpdate]) -> TableUpdate:
    if len(parts) < 2:
        return parts[0] if parts else NO_UPDATE
    return TableUpdate(
        np.concatenate([part.rows for part in parts]),
        np.concatenate([part.columns for part in parts]),
        np.concatenate([part.block_ids for part in parts]),
    )
