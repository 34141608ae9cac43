"""One step of all running requests as vector operations, equal to a sequence of `allocate_slots` calls.

Flow:    rows + new tokens, in scheduling order -> [StepPlanner.plan] -> block tables, prefix cache, StepResult
Source:  DESIGN, "plan_step"; why bulk equals sequential: ARCHITECTURE.md, "Planning a step"

Most rows of a decoding step have nothing to do: `KVCacheCoordinator.quiet_until` tells which in a few operations.
The rest are planned in runs, each run as

    1  give back what left the windows        row by row, groups inner
    2  take all new blocks at once            dealt row by row, groups inner
    3  register the blocks that filled        rows in order, group by group

This equals the row-by-row sequence while the run's blocks come from those free before the run's own releases, and no
release goes to the head of the free queue. `_run_end` cuts runs by that rule; a row that begins no run is planned
alone, and the first that does not fit ends the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvjax.core.block_hash import BlockHash
from kvjax.core.coordinator import GroupFamily, KVCacheCoordinator
from kvjax.core.kv_cache_blocks import NO_BLOCK_IDS
from kvjax.core.request_table import RequestTable
from kvjax.core.single_type_manager import Spans
from kvjax.core.step_plan import StepResult, TableUpdate

NO_UPDATE = TableUpdate(np.empty(0, np.int64), np.empty(0, np.int64), NO_BLOCK_IDS)


@dataclass(frozen=True)
class Columns:
    """Per row of a step the first column of a run of one family's columns, and how many; 0 for none."""

    starts: np.ndarray  # int64[n]
    counts: np.ndarray  # int64[n]

    def spans(self, rows: np.ndarray, part: slice) -> tuple[np.ndarray, Spans]:
        """Among the rows of `part`: the indices of those with a run, and the runs."""
        chosen = np.flatnonzero(self.counts[part])
        return chosen, Spans(rows[part][chosen], self.starts[part][chosen], self.counts[part][chosen])


@dataclass(frozen=True)
class StepWork:
    """The rows of a step that have something to do, in scheduling order, and what. Families in coordinator order."""

    rows: np.ndarray  # int64[n]
    settled_tokens: np.ndarray  # int64[n] computed tokens that can not be taken back
    num_slots: np.ndarray  # int64[n]
    num_cacheable: np.ndarray  # int64[n] tokens whose full blocks may be registered
    skipped: tuple[Columns, ...]  # per family, to give back
    needed: tuple[Columns, ...]  # per family, to append


@dataclass(frozen=True)
class Layout:
    """Places in one sequence of blocks."""

    total: int
    starts: dict[int, np.ndarray]  # group -> int64[n] where each row's run begins


class StepPlanner:
    """Plans steps over one coordinator's groups. Owned by one `KVCacheManager`; keeps no state between calls."""

    def __init__(self, coordinator: KVCacheCoordinator, request_table: RequestTable) -> None:
        self._coordinator = coordinator
        self._table = request_table
        self._max_model_len = coordinator.settings.max_model_len
        self._families = coordinator.families
        self._no_updates = (NO_UPDATE,) * len(coordinator.managers)
        self._scratch = np.zeros(0, np.int64)  # [rows]
        pool_ids = coordinator.pool_ids
        self._families_of_pool = [
            [i for i, family in enumerate(self._families) if pool_ids[family.group_ids[0]] == pool_id]
            for pool_id in range(len(coordinator.pools))
        ]

    def plan(
        self,
        rows: npt.ArrayLike,
        num_new_tokens: npt.ArrayLike,
        num_lookahead_tokens: npt.ArrayLike,
        num_in_flight_tokens: npt.ArrayLike,
        delay_cache_blocks: bool,
    ) -> StepResult:
        """`KVCacheManager.plan_step`."""
        index = self._checked_rows(rows)
        new = _checked_counts("num_new_tokens", num_new_tokens, index, least=1)
        lookahead = _checked_counts("num_lookahead_tokens", num_lookahead_tokens, index, least=0)
        in_flight = _checked_counts("num_in_flight_tokens", num_in_flight_tokens, index, least=0)
        if not index.size:
            return StepResult(0, self._no_updates)
        computed = self._table.num_computed_tokens[index]
        after = computed + new
        longest = int(after.max())
        if longest > self._max_model_len:
            row, limit = index[after.argmax()], self._max_model_len
            raise ValueError(f"row {row}: expected at most max_model_len = {limit} tokens, got {longest}")
        num_slots = np.minimum(after + lookahead, self._max_model_len)
        active = np.flatnonzero(num_slots > self._coordinator.quiet_until[index])
        if not active.size:
            return StepResult(index.size, self._no_updates)
        settled = np.maximum(computed - in_flight, 0)[active]
        work = self._work(index[active], settled, num_slots[active], after[active], delay_cache_blocks)
        num_done, updates = self._plan_work(work)
        return StepResult(index.size if num_done == active.size else int(active[num_done]), updates)

    def _checked_rows(self, rows: npt.ArrayLike) -> np.ndarray:  # int64[n]
        index = np.asarray(rows)
        if index.ndim != 1 or (index.size and index.dtype.kind not in "iu"):
            raise ValueError(f"expected rows as a row of integers, got {index.dtype}{list(index.shape)}")
        index = index.astype(np.int64, copy=False)
        if not index.size:
            return index
        quiet_until = self._coordinator.quiet_until
        if index.min() < 0 or index.max() >= quiet_until.size or quiet_until[index].min() < 0:
            bad = [row for row in index.tolist() if not 0 <= row < quiet_until.size or quiet_until[row] < 0]
            raise ValueError(f"expected rows that a request owns, got row {bad[0]}")
        if self._scratch.size < quiet_until.size:
            self._scratch = np.zeros(quiet_until.size, np.int64)
        order = np.arange(index.size)
        self._scratch[index] = order
        if not (self._scratch[index] == order).all():
            raise ValueError(f"expected distinct rows, got {index.tolist()}")
        return index

    def _work(
        self, rows: np.ndarray, settled: np.ndarray, num_slots: np.ndarray, after: np.ndarray, delay_cache_blocks: bool
    ) -> StepWork:
        managers = [family.managers[0] for family in self._families]
        coordinator = self._coordinator
        if delay_cache_blocks or not coordinator.settings.enable_caching:
            num_cacheable = np.zeros_like(after)
        else:
            hashed = self._table.num_hashed_blocks[rows] * coordinator.hashing.hash_block_size
            num_cacheable = np.minimum(after, hashed)
        return StepWork(
            rows=rows,
            settled_tokens=settled,
            num_slots=num_slots,
            num_cacheable=num_cacheable,
            skipped=tuple(Columns(*manager.skipped_columns(rows, settled)) for manager in managers),
            needed=tuple(Columns(*manager.needed_columns(rows, num_slots)) for manager in managers),
        )

    def _plan_work(self, work: StepWork) -> tuple[int, tuple[TableUpdate, ...]]:
        """Plans rows until one does not fit; how many did, and what was written per group."""
        num_rows = work.rows.size
        updates: list[list[TableUpdate]] = [[] for _ in self._no_updates]
        start = 0
        while start < num_rows:
            end = self._run_end(work, start)
            if end > start:
                self._plan_run(work, slice(start, end), updates)
            elif self._plan_one(work, start, updates):
                end = start + 1
            else:
                break
            start = end
        return start, tuple(_joined(parts) for parts in updates)

    # -- where a run ends -------------------------------------------------------------------------------------------

    def _run_end(self, work: StepWork, start: int) -> int:
        """End of the longest run from row `start` on for which bulk equals sequential; `start` if there is none."""
        end = work.rows.size
        for pool, family_ids in zip(self._coordinator.pools, self._families_of_pool, strict=True):
            needs = np.zeros(end - start, np.int64)
            for i in family_ids:
                needs += work.needed[i].counts[start:end] * len(self._families[i].managers)
            if needs.sum() > pool.num_free_blocks:
                end = start + int(np.searchsorted(needs.cumsum(), pool.num_free_blocks, side="right"))
            if pool.free_order == "uncached_first":
                for i in family_ids:
                    end = min(end, self._first_unhashed_release(work, i, slice(start, end)))
        return end

    def _first_unhashed_release(self, work: StepWork, family_id: int, part: slice) -> int:
        """First row of `part` that gives back a block without a hash, or its end."""
        chosen, spans = work.skipped[family_id].spans(work.rows, part)
        if not chosen.size:
            return part.stop
        owners = spans.spread(chosen)
        ends = [part.stop]
        for manager in self._families[family_id].managers:
            unhashed = ~manager.block_pool.is_hashed[manager.block_table[spans.entries()]]
            if unhashed.any():
                ends.append(part.start + int(owners[unhashed.argmax()]))
        return min(ends)

    # -- planning a run ---------------------------------------------------------------------------------------------

    def _plan_run(self, work: StepWork, part: slice, updates: list[list[TableUpdate]]) -> None:
        rows = work.rows[part]
        for family_ids in self._families_of_pool:
            self._release(work, part, family_ids)
        for family_ids in self._families_of_pool:
            self._allocate(work, part, family_ids, updates)
        for family in self._families:
            self._register(family, rows, work.num_cacheable[part])
        self._coordinator.note_quiet_rows(rows)

    def _release(self, work: StepWork, part: slice, family_ids: list[int]) -> None:
        """Gives back what left the windows, of one pool's families."""
        layout = self._layout([work.skipped[i].counts[part] for i in family_ids], family_ids)
        if not layout.total:
            return
        released = np.empty(layout.total, np.int32)
        for i in family_ids:
            family = self._families[i]
            chosen, spans = work.skipped[i].spans(work.rows, part)
            if chosen.size:
                entries = spans.entries(descending=True)
                for group_id, manager in zip(family.group_ids, family.managers, strict=True):
                    released[spans.run(layout.starts[group_id][chosen])] = manager.detach(spans, entries)
        self._families[family_ids[0]].managers[0].block_pool.free_blocks(released)

    def _allocate(self, work: StepWork, part: slice, family_ids: list[int], updates: list[list[TableUpdate]]) -> None:
        """Takes the new blocks of one pool's families at once and deals them."""
        layout = self._layout([work.needed[i].counts[part] for i in family_ids], family_ids)
        if not layout.total:
            return
        dealt = self._families[family_ids[0]].managers[0].block_pool.get_new_blocks(layout.total)
        for i in family_ids:
            family = self._families[i]
            chosen, spans = work.needed[i].spans(work.rows, part)
            if not chosen.size:
                continue
            entries = spans.entries()
            num_columns = int(entries[1].max()) + 1
            for group_id, manager in zip(family.group_ids, family.managers, strict=True):
                block_ids = dealt[spans.run(layout.starts[group_id][chosen])]
                manager.reserve_columns(num_columns)
                manager.attach(spans, entries, block_ids)
                updates[group_id].append(TableUpdate(*entries, block_ids))

    def _layout(self, counts: list[np.ndarray], family_ids: list[int]) -> Layout:
        """Where each (row, group) run lies in one sequence of blocks, rows in order, groups inner."""
        by_group = sorted(
            (group_id, position) for position, i in enumerate(family_ids) for group_id in self._families[i].group_ids
        )
        matrix = np.stack([counts[position] for _, position in by_group], axis=1)
        ends = matrix.ravel().cumsum()
        starts = ends.reshape(matrix.shape) - matrix
        return Layout(int(ends[-1]), {group_id: starts[:, k] for k, (group_id, _) in enumerate(by_group)})

    def _register(self, family: GroupFamily, rows: np.ndarray, num_cacheable: np.ndarray) -> None:
        """Registers the blocks of the family's groups that filled."""
        chosen, spans = Columns(*family.managers[0].unregistered_columns(rows, num_cacheable)).spans(rows, slice(None))
        if not chosen.size:
            return
        if family.managers[0].block_pool.enable_kv_cache_events:
            self._register_one_by_one(family, spans.rows.tolist(), num_cacheable[chosen].tolist())
            return
        entries = spans.entries()
        hashes = self._hashes(family, spans, entries)
        for manager in family.managers:
            manager.register(spans, entries, hashes)

    def _register_one_by_one(self, family: GroupFamily, rows: list[int], num_cacheable: list[int]) -> None:
        """KV events tell of each request's tokens and parents."""
        for row, num_tokens in zip(rows, num_cacheable, strict=True):
            request = self._table.requests[row]
            assert request is not None  # the rows were checked
            hashes = self._coordinator.hashing.of_block_size(request.block_hashes, family.block_size)
            for manager in family.managers:
                manager.cache_blocks(request, row, hashes, num_tokens)

    def _hashes(self, family: GroupFamily, spans: Spans, entries: tuple[np.ndarray, np.ndarray]) -> list[BlockHash]:
        """The hash of each entry."""
        lists, hashing = self._table.block_hashes, self._coordinator.hashing
        rows, columns = (index.tolist() for index in entries)
        if family.block_size == hashing.hash_block_size:
            return [lists[row][column] for row, column in zip(rows, columns, strict=True)]
        coarse = {row: hashing.of_block_size(lists[row], family.block_size) for row in spans.rows.tolist()}
        return [coarse[row][column] for row, column in zip(rows, columns, strict=True)]

    # -- planning one row -------------------------------------------------------------------------------------------

    def _plan_one(self, work: StepWork, i: int, updates: list[list[TableUpdate]]) -> bool:
        row = work.rows.item(i)
        request = self._table.requests[row]
        assert request is not None  # the rows were checked
        firsts = [manager.num_blocks.item(row) for manager in self._coordinator.managers]
        new_ids = self._coordinator.extend_row(
            request, row, work.settled_tokens.item(i), work.num_slots.item(i), work.num_cacheable.item(i)
        )
        if new_ids is None:
            return False
        for parts, first, ids in zip(updates, firsts, new_ids, strict=True):
            if ids.size:
                parts.append(TableUpdate(np.full(ids.size, row), np.arange(first, first + ids.size), ids))
        return True


def _checked_counts(name: str, values: npt.ArrayLike, rows: np.ndarray, least: int) -> np.ndarray | int:
    """`values` as an int, or as one int64 per row."""
    counts = values if isinstance(values, int) else np.asarray(values)
    if isinstance(counts, int):
        lowest = counts
    else:
        if counts.size and counts.dtype.kind not in "iu":
            raise ValueError(f"expected {name} as integers, got {counts.dtype}")
        if counts.ndim and counts.shape != rows.shape:
            raise ValueError(f"expected {name} for {rows.size} rows or one number, got shape {list(counts.shape)}")
        counts = counts.astype(np.int64, copy=False)
        lowest = int(counts.min()) if counts.size else least
    if lowest < least:
        raise ValueError(f"expected {name} >= {least}, got {lowest}")
    return counts


def _joined(parts: list[TableUpdate]) -> TableUpdate:
    if len(parts) < 2:
        return parts[0] if parts else NO_UPDATE
    return TableUpdate(
        np.concatenate([part.rows for part in parts]),
        np.concatenate([part.columns for part in parts]),
        np.concatenate([part.block_ids for part in parts]),
    )
