"""Kinds with one recurrent state a page: it holds everything before it, so the last one suffices.

Flow:    RecurrentSpec -> [RecurrentManager] -> SingleTypeKVCacheManager
Source:  vLLM v1/core/single_type_kv_cache_manager.py (MambaManager)

Mode `align` keeps table columns of `block_size` tokens. The state after n tokens is in column (n - 1) // block_size, so
a block that filled holds the state at its end and can be a prefix hit. Where an answer passes over that column, the
state is in the next one that has a block. With s speculative blocks a row looks like

    | null ... null | state | null ... null | running | speculative 1 ... s |
                      read                    written                        num_blocks

A step writes to column (after - 1) // block_size, lookahead not counted. Where that is a new column, speculative
blocks move on with it and one new block follows them; columns passed over stay null. A state is freed once
tokens of a later column are settled. If every step enters a new column, that is two steps after it was written.

A step that leaves a column it began inside has to end where the column ends (`state_steps`); else the column would hold
the state of fewer tokens than it is registered under. A step of at most 1 + s tokens may go on, since the device leaves
a state after each of them. The state at the end of a column goes to the column's own block, the state before the last j
tokens to speculative block j. When drafts are rejected (`take_back`), the block that has the accepted state changes
places with the one in the column of its tokens, which holds nothing of use then.

Mode `none` keeps 1 + s blocks for life in one column of all tokens, and never hits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, final

import numpy as np

from kvjax.core.kinds.inner_states import NEW_ROW, InnerStates, Place
from kvjax.core.kinds.manager_settings import TableLayout
from kvjax.core.kinds.prefix_lookup import HitScan, PrefixLookup
from kvjax.core.kinds.recurrent_spec import RecurrentSpec
from kvjax.core.kinds.single_type_manager import Entries, SingleTypeKVCacheManager
from kvjax.core.kinds.state_scan import StateScan
from kvjax.core.kinds.state_steps import StateBlocks
from kvjax.core.spec import NEVER, cdiv
from kvjax.core.tables.column_runs import Runs
from kvjax.core.tables.row_changes import RowChanges

if TYPE_CHECKING:
    from kvjax.core.hashing.block_hash import BlockHash
    from kvjax.core.requests.request import Request


@final
class RecurrentManager(SingleTypeKVCacheManager):
    """Both modes: `none` is `align` with one column for all tokens, and caches nothing.

    A request never starts before `new_step_starts` from a block registered in this step: its state does not exist yet.
    """

    holds_states: ClassVar[bool] = True

    kv_cache_spec: RecurrentSpec

    def table_layout(self) -> TableLayout:
        """Running and speculative columns are the tail; in mode `none` no request fills the one column."""
        spec, settings = self.kv_cache_spec, self.settings
        tail = 1 + spec.num_speculative_blocks
        if spec.mamba_cache_mode == "align":
            return TableLayout(spec.block_size, tail, settings.options.enable_caching, same_step_hits=False)
        block_size = spec.block_size * (settings.max_model_len // spec.block_size + 1)
        return TableLayout(block_size, tail, enable_caching=False, same_step_hits=False)

    def find_misplaced(self, is_block: np.ndarray, inside: np.ndarray) -> str | None:
        """Blocks stand inside, nulls between them, and every row has its tail."""
        if not (is_block <= inside).all():
            return "expected null blocks outside [first_live, num_blocks)"
        for row in np.flatnonzero(self.num_blocks).tolist():
            end = self.num_blocks.item(row)
            if not is_block[:, row, end - self.num_tail_columns : end].all():
                return f"row {row} lacks a running or speculative block"
        return None

    @property
    def _num_speculative(self) -> int:
        return self.num_tail_columns - 1

    def start_scan(self, lookup: PrefixLookup) -> HitScan:
        """Right to left: the rightmost cached state at an aligned length. A dropped block need not be cached."""
        return StateScan(self, lookup)

    @property
    def state_blocks(self) -> StateBlocks | None:
        """Where steps must end, so that what is cached is right."""
        return StateBlocks(self.block_size, self.kv_cache_spec.num_drafts) if self.enable_caching else None

    @property
    def has_drafts_in_rings(self) -> bool:
        """Whether drafts have no states: what they add is in the page of the row's running state."""
        return self.kv_cache_spec.num_drafts > self._num_speculative

    def tokens_left(self, rows: np.ndarray, num_computed: np.ndarray) -> np.ndarray:  # int64[n]
        """Tokens up to the end of the running columns of rows with int64[n] computed tokens; 0: new ones come next."""
        return self.num_blocks[rows] * self.block_size - num_computed

    def check_rings(self, rows: np.ndarray, num_computed: np.ndarray, after: np.ndarray) -> None:
        """Checks steps of int64[n] rows that have drafts in rings: a page that may be hit has all tokens of its column.

        Without caching a prompt's steps may end anywhere; `limit_drafts` is for others.

        Raises:
            ValueError: a step begins inside the running column, and ends behind it.
        """
        if not self.enable_caching:
            return
        left = self.tokens_left(rows, num_computed)
        bad = (num_computed > 0) & (left > 0) & (after - num_computed > left)
        if bad.any():
            i = int(bad.argmax())
            raise ValueError(
                f"row {rows[i]}, groups {self.group_ids}: expected at most {left[i]} new tokens after "
                f"{num_computed[i]}, where the page of its recurrent state ends, got {after[i] - num_computed[i]}; "
                "draft fewer (`limit_drafts`)"
            )

    # One row.

    @property
    def max_encoder_tokens(self) -> int:
        """`NEVER`: they take no slots here."""
        return NEVER

    def slots_of(self, num_slots: int, num_encoder_tokens: int) -> int:
        """The slots of the request's tokens."""
        return num_slots

    def num_blocks_for_new(self, num_slots: int, hit_ids: np.ndarray, total_computed: int, capped: bool) -> int:
        """The running state and those of drafts, one more where a state from outside ends an earlier column."""
        skipped = self.get_num_skipped_tokens(total_computed) // self.block_size
        live = hit_ids[:, skipped:]
        evictable = int((self.block_pool.ref_count[live] == 0).sum()) if live.size else 0
        num_columns, num_hit = cdiv(num_slots, self.block_size), hit_ids.shape[1]
        has_external = total_computed > num_hit * self.block_size
        num_new = self.num_tail_columns + (has_external and num_columns > cdiv(total_computed, self.block_size))
        if self.inner_states is not None:
            missing = num_columns + self._num_speculative - num_hit
            num_new += self.inner_states.num_new(NEW_ROW, missing) - self.num_tail_columns
        return self.num_groups * num_new + evictable

    def num_blocks_for_running(self, row: int, num_slots: int, capped: bool = False) -> int:
        """One per group if the step enters a new column."""
        missing = self._columns_for(row, num_slots) - self.num_blocks.item(row)
        if self.inner_states is not None:
            return self.num_groups * (self.inner_states.num_new(row, missing) + (row in self.inner_states.tails))
        return self.num_groups * (missing > 0)

    def worst_case_blocks(self, num_slots: int) -> int:
        """States from the column of the settled tokens to the running one, and those of drafts."""
        in_flight = cdiv(self.settings.max_in_flight_tokens, self.block_size) + 1
        return self.num_groups * (min(cdiv(num_slots, self.block_size), in_flight) + self._num_speculative)

    def allocate_new_blocks(self, row: int, num_slots: int) -> np.ndarray:
        """Moves the row on to the column of `num_slots` tokens.

        Returns:
            int32[G, k] what the columns from the old end on hold: nulls, moved blocks, new ones.
        """
        held, required = self.num_blocks.item(row), self._columns_for(row, num_slots)
        if self.inner_states is not None:
            return self._allocate_with_checkpoint(row, held, required, self.inner_states)
        if required <= held:
            return self.no_blocks
        self._table.reserve_columns(required)
        # a row whose columns are all registered has a hit at most: speculative blocks are not
        is_first = held == self.num_cached_blocks.item(row)
        num_new = self.num_tail_columns if is_first else 1
        ids = self.block_pool.get_new_blocks(self.num_groups * num_new).reshape(self.num_groups, -1)
        if not is_first:
            self._move_speculative(np.array([row]), np.array([required]))
        self.block_tables[:, row, required - num_new : required] = ids
        self.num_blocks[row] = required
        return self.block_tables[:, row, held:required].copy()

    def _allocate_with_checkpoint(self, row: int, held: int, required: int, inner: InnerStates) -> np.ndarray:
        """`allocate_new_blocks` where a column before the running one may have a state too."""
        self._hand_tail_on(row, inner)
        had_tail = row in inner.started
        inner.started.add(row)
        if required <= held:
            return self.no_blocks
        self._table.reserve_columns(required)
        first = required - self.num_tail_columns - (row in inner.checkpoints)  # columns before it are passed over
        first_left = held - self._num_speculative * had_tail
        end_left = max(min(first, held), first_left)
        place = max(held, first)
        moved = self.block_tables[:, row, first_left:end_left].copy()
        self.block_tables[:, row, first_left:end_left] = 0
        self.block_tables[:, row, place : place + moved.shape[1]] = moved
        place += moved.shape[1]
        ids = self.block_pool.get_new_blocks(self.num_groups * (required - place)).reshape(self.num_groups, -1)
        self.block_tables[:, row, place:required] = ids
        self.num_blocks[row] = required
        return self.block_tables[:, row, held:required].copy()

    def _hand_tail_on(self, row: int, inner: InnerStates) -> None:
        """Copies take over what the row's tail is registered under: the row writes to the tail in this step."""
        place = inner.take_tail(row)
        if place is None:
            return
        pool, tails = self.block_pool, self.block_tables[:, row, place.column].tolist()
        copies = pool.get_new_blocks(self.num_groups)
        for tail, copy in zip(tails, copies.tolist(), strict=True):
            pool.move_hashes(tail, copy)
            pool.page_edits.keep_copy(tail, copy)
        self.fresh_blocks.add(copies)
        inner.note_moved(row, place, copies.tolist())

    def register_state(
        self,
        request: Request,
        row: int,
        block_hashes: Sequence[BlockHash],
        place: Place,
        replaces: bool = False,
    ) -> None:
        """Registers the blocks in a column under the hash of the tokens before their state.

        `block_hashes` are the request's at the hash block size; `replaces`: the blocks hold another state than before.
        """
        ids = self.block_tables[:, row, place.column]
        for group_id, block_id in zip(self.group_ids, ids.tolist(), strict=True):
            if block_id:
                pool = self.block_pool
                pool.cache_inner(request, block_id, block_hashes, place.num_tokens, group_id, replaces)
        self.fresh_blocks.add(ids[ids != 0])

    def take_moved_tails(self, row: int) -> list[tuple[Place, list[int]]]:
        """The row's tails that copies took over since the last call, with the copies of all groups."""
        return [] if self.inner_states is None else self.inner_states.take_moved(row)

    def num_tokens_of(self, row: int, column: int) -> int:
        """Tokens before the state under which a row's block is registered; 0: it is not."""
        block_id, index = self.block_tables.item(0, row, column), self.block_pool.prefix_index
        if not index.is_hashed[block_id]:
            return 0
        return index.inner.num_tokens.get(block_id, (column + 1) * self.block_size)

    @property
    def leaves_states_on_the_way(self) -> bool:
        """Whether a step may leave states before its end: drafts have columns there."""
        return self.answer_states is not None and not self._num_speculative

    def take_checkpoints(self, row: int, columns: np.ndarray) -> None:
        """Takes blocks for the states at the ends of int64[n] columns that a step passes over."""
        ids = self.block_pool.get_new_blocks(self.num_groups * columns.size).reshape(self.num_groups, -1)
        self.block_tables[:, row, columns] = ids

    def held_slots(self, row: int) -> int:
        """Slots up to the end of the running column; speculative columns have none."""
        return (self.num_blocks.item(row) - self._num_speculative) * self.block_size

    def written_column(self, row: int, num_tokens: int) -> int | None:
        """That of the state after `num_tokens` tokens, unless it is the one at the end of its column."""
        column = self._state_column(row, num_tokens)
        return None if num_tokens == (column + 1) * self.block_size else column

    def num_blocks_for_share(self, num_rows: int) -> int:
        """The blocks for drafts' states."""
        return num_rows * self.num_groups * self._num_speculative

    def share_row(self, row: int, new_rows: np.ndarray, num_tokens: int) -> None:
        """Gives int64[n] new rows the state after `num_tokens` tokens, by reference, and new blocks for drafts."""
        column = self.end_column(row, num_tokens) - 1
        state = self.block_tables[:, row, self._state_column(row, num_tokens)]
        self._table.reserve_columns(column + self.num_tail_columns)
        self.block_pool.touch(np.tile(state, new_rows.size))
        self.block_tables[:, new_rows, column] = state[:, None]
        new_ids = self.block_pool.get_new_blocks(self.num_blocks_for_share(new_rows.size))
        by_row = new_ids.reshape(new_rows.size, self.num_groups, -1)
        self.block_tables[:, new_rows, column + 1 : column + self.num_tail_columns] = by_row.swapaxes(0, 1)
        if self.inner_states is not None:
            self.inner_states.started.update(new_rows.tolist())
        self.num_blocks[new_rows] = column + self.num_tail_columns
        self.num_cached_blocks[new_rows] = min(self.num_cached_blocks.item(row), self.full_column(row, num_tokens))
        self.first_live[new_rows] = cdiv(num_tokens, self.block_size) - 1

    def _state_column(self, row: int, num_tokens: int) -> int:
        """The column of the state after `num_tokens` tokens: its own or, without a block, the next with one."""
        column, end = max(num_tokens - 1, 0) // self.block_size, self.num_blocks.item(row)
        return column + int((self.block_tables[0, row, column:end] != 0).argmax())

    def _columns_for(self, row: int, num_slots: int) -> int:
        return self.end_column(row, num_slots) + self._num_speculative

    # Many rows.

    def plan_rows(
        self, rows: np.ndarray, settled_tokens: np.ndarray, num_slots: np.ndarray, num_cacheable: np.ndarray
    ) -> RowChanges:
        """What one step of int64[n] rows changes: at most one new block, in the last column."""
        size, speculative, columns = self.block_size, self._num_speculative, self.answer_columns
        held, cached, before = self.num_blocks[rows], self.num_cached_blocks[rows], self.first_live[rows]
        if columns is None:
            required, full = (num_slots + (size - 1)) // size, num_cacheable // size
        else:
            longest = columns.longest_ahead(rows, num_slots, cached)
            required, full = columns.end(longest, num_slots), columns.full(longest, num_cacheable)
        if speculative:
            required += speculative
        num_blocks, num_cached_blocks = np.maximum(held, required), np.maximum(cached, full)
        first = np.minimum(self.get_num_skipped_tokens(settled_tokens) // size, held - self.num_tail_columns)
        first = np.maximum(first, before)
        idle_until = np.minimum((num_blocks - speculative) * size, self.tokens_until_release(first))
        idle_until = np.minimum(idle_until, self.settings.max_model_len)
        if self.enable_caching:
            next_full = num_cached_blocks * size + size
            if columns is not None:
                next_full = columns.next_full(longest, num_cached_blocks)
            idle_until = np.minimum(idle_until, next_full - 1)
        return RowChanges(
            skipped=Runs.between(rows, before, first),
            needed=Runs.last(rows, held, required),
            filled=Runs.between(rows, cached, full),
            num_blocks=num_blocks,
            num_cached_blocks=num_cached_blocks,
            first_live=first,
            idle_until=idle_until,
        )

    def attach(self, rows: np.ndarray, columns: np.ndarray, block_ids: np.ndarray) -> Entries:
        """Moves int64[k] rows on to end at int64[k] columns, where int32[G, k] new blocks stand.

        Returns:
            Rows, columns and blocks of all columns from the old ends on.
        """
        held = self.num_blocks[rows]
        if self._table.num_columns < self.max_columns:
            self._table.reserve_columns(int(np.maximum.reduce(columns)) + 1)
        if self._num_speculative:
            self._move_speculative(rows, columns + 1)
        self.block_tables[:, rows, columns] = block_ids
        entered = Runs.between(rows, held, columns + 1)
        if entered.is_single:
            return rows, columns, block_ids
        rows, columns = entered.entries()
        return rows, columns, self.block_tables[:, rows, columns]

    def take_back(self, rows: np.ndarray, num_tokens: np.ndarray, num_kept: np.ndarray) -> Entries:
        """Puts the block of the state after `num_kept` tokens into their column, the block there in its place.

        Columns that a step passed over do not stay between the state and the next running one: blocks behind move up.
        Rings need nothing: the next step reads fewer of their tokens.
        """
        if self.has_drafts_in_rings:
            return rows[:0], rows[:0], self.no_blocks
        columns = self.end_column(rows, num_kept) - 1
        running = self.num_blocks[rows] - self.num_tail_columns
        sources = running + num_tokens - num_kept
        has_block = self.block_tables[0, rows, columns] != 0
        is_at_end = has_block & (num_kept == (columns + 1) * self.block_size)
        passed = ~has_block | (columns < running - 1)
        if passed.any():
            sources = np.where(is_at_end, columns, sources)
            return self._take_back_each(rows, columns, sources)
        rows, columns, sources = rows[~is_at_end], columns[~is_at_end], sources[~is_at_end]
        tables = self.block_tables
        accepted = tables[:, rows, sources]
        tables[:, rows, sources] = tables[:, rows, columns]
        tables[:, rows, columns] = accepted
        changed, at = np.concatenate([rows, rows]), np.concatenate([columns, sources])
        return changed, at, tables[:, changed, at]

    def _take_back_each(self, rows: np.ndarray, columns: np.ndarray, sources: np.ndarray) -> Entries:
        """Row by row: the block at its source comes to its column, the others go where later tokens look for them."""
        entries = []
        for row, column, source in zip(rows.tolist(), columns.tolist(), sources.tolist(), strict=True):
            end = self.num_blocks.item(row)
            behind = self.block_tables[:, row, column:end]
            order = behind[0].nonzero()[0]
            order = np.concatenate([[source - column], order[order != source - column]])
            blocks, places = behind[:, order], self._places_behind(row, column, order.size)
            behind.fill(0)
            behind[:, places - column] = blocks
            self.num_blocks[row] = places[-1] + 1
            entries.append((np.full(end - column, row), np.arange(column, end), behind.copy()))
        changed, at, blocks = zip(*entries, strict=True)
        return np.concatenate(changed), np.concatenate(at), np.concatenate(blocks, axis=1)

    def _places_behind(self, row: int, column: int, num_blocks: int) -> np.ndarray:  # int64[num_blocks]
        """The columns of a state's block and those behind it: running blocks where states end, then the speculative."""
        places = [column]
        for _ in range(num_blocks - self.num_tail_columns):
            places.append(self.end_column(row, (places[-1] + 1) * self.block_size + 1) - 1)
        return np.array([*places, *range(places[-1] + 1, places[-1] + self.num_tail_columns)])

    def move_back(self, row: int, num_tokens: int) -> None:
        """Ends the row's tail at the column of its newest state again, so that the next step may pass over others."""
        column, end = self.end_column(row, num_tokens) - 1, self.num_blocks.item(row)
        behind = self.block_tables[:, row, column:end]
        blocks = behind[:, behind[0] != 0]
        if end - self.num_tail_columns <= column or not behind[0, 0]:
            return
        behind.fill(0)
        behind[:, : self.num_tail_columns] = blocks[:, : self.num_tail_columns]
        self.num_blocks[row] = column + self.num_tail_columns
        self.block_pool.free_held(blocks[:, self.num_tail_columns :].ravel())

    def _move_speculative(self, rows: np.ndarray, num_columns: np.ndarray) -> None:
        """Moves speculative blocks that int64[k] rows of int64[k] columns leave behind to before the last column."""
        held = self.num_blocks[rows]
        moved = np.minimum(num_columns - held - 1, self._num_speculative)
        for i in range(self._num_speculative):
            own = rows[moved > i]
            source = (held - self._num_speculative + i)[moved > i]
            self.block_tables[:, own, (num_columns - 1 - moved + i)[moved > i]] = self.block_tables[:, own, source]
            self.block_tables[:, own, source] = 0


__all__ = ["RecurrentManager"]
