"""Recurrent layers (Mamba, linear attention): a page is one state of everything before it, and the last one suffices.

Source:  vLLM v1/core/single_type_kv_cache_manager.py (MambaManager), v1/kv_cache_interface.py (MambaSpec)

Mode `align` keeps table columns of `block_size` tokens. The state after n tokens is in column (n - 1) // block_size, so
a block that filled holds the state at its end and can be a prefix hit. With s speculative blocks a row looks like

    | null ... null | state | null ... null | running | speculative 1 ... s |
                      read                    written                        num_blocks

A step writes to column (after - 1) // block_size, lookahead not counted. Where that is a new column, speculative
blocks move on with it and one new block follows them; columns passed over stay null. A state goes back once the
settled tokens lie in a later column: two steps after it was written, where every step enters a new one.

A step that leaves a column it began inside has to end where the column ends (`state_steps`); else the column would hold
the state of fewer tokens than it is registered under. Where drafts cross the end, the device leaves the state at the
end in that column's page once it knows what was accepted.

Mode `none` keeps 1 + s blocks for life in one column of all tokens, and never hits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

import numpy as np

from kvjax.core.kinds.registry import register_kv_cache_manager
from kvjax.core.kinds.retention import CheckpointBlocks
from kvjax.core.kinds.single_type_manager import IntOrArray, PrefixLookup, SingleTypeKVCacheManager
from kvjax.core.kinds.state_steps import StateBlocks
from kvjax.core.spec import KVCacheSpec, StatePages, cdiv
from kvjax.core.tables.column_runs import Runs
from kvjax.core.tables.row_changes import RowChanges
from kvjax.errors import InvariantError
from pallas_kernels.layouts import PageLayout, dtype_bits, recurrent_layout

MODES = ("none", "align")


@dataclass(frozen=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """Arrays of one state: `shapes` and `dtypes` side by side, for example of convolution and recurrence."""

    layer_fields: ClassVar[frozenset[str]] = frozenset({"shapes", "dtypes", "page_size_padded"})

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    mamba_cache_mode: str = "none"
    num_speculative_blocks: int = 0  # one state per drafted token
    page_size_padded: int | None = None  # bytes; None: as the state needs

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            raise ValueError(f"expected a dtype for each of one or more shapes, got {self.shapes} and {self.dtypes}")
        if any(size < 1 for shape in self.shapes for size in shape):
            raise ValueError(f"expected sizes >= 1 in shapes, got {self.shapes}")
        for dtype in self.dtypes:
            dtype_bits(dtype)
        if self.mamba_cache_mode not in MODES:
            raise ValueError(f"expected mamba_cache_mode none or align, got {self.mamba_cache_mode!r}")
        if self.num_speculative_blocks < 0:
            raise ValueError(f"expected num_speculative_blocks >= 0, got {self.num_speculative_blocks}")
        if self.page_size_padded is not None and self.state_bytes > self.page_size_padded:
            raise ValueError(
                f"expected page_size_padded >= {self.state_bytes}, the bytes of a state, got {self.page_size_padded}"
            )

    @property
    def kind(self) -> str:
        """Name in KV events."""
        return "mamba"

    @property
    def state_bytes(self) -> int:
        """Bytes of one state."""
        return sum(prod(shape) * dtype_bits(dtype) // 8 for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    @property
    def page_size_bytes(self) -> int:
        """One state, or what its page is padded to."""
        return self.state_bytes if self.page_size_padded is None else self.page_size_padded

    @property
    def state_pages(self) -> StatePages:
        """The spec itself."""
        return self

    def page_layout(self, platform: str) -> PageLayout:
        """Arrays that hold one layer's states; `page_size_padded` is for stacks that lay out bytes."""
        return recurrent_layout(shapes=self.shapes, dtypes=self.dtypes, platform=platform)

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """The running state, those of drafts, and with `align` the state that the step starts from."""
        return 1 + (self.mamba_cache_mode == "align") + self.num_speculative_blocks

    def pages_of_states(
        self,
        table: np.ndarray,  # int32[rows, columns]
        num_blocks: np.ndarray,  # int64[rows]
        rows: np.ndarray,  # int64[S]
        num_tokens: np.ndarray,  # int64[S]
    ) -> np.ndarray:  # int32[S]
        """The page of each row's state after `num_tokens` tokens; the running one where its column has no block."""
        running = table[rows, num_blocks[rows] - 1 - self.num_speculative_blocks]
        if self.mamba_cache_mode == "none":
            return running
        pages = table[rows, np.maximum(num_tokens - 1, 0) // self.block_size]
        return np.where(pages == 0, running, pages)

    def most_tokens(self, num_blocks: np.ndarray) -> np.ndarray:
        """Tokens that rows with int64[S] `num_blocks` columns may have."""
        tokens = (num_blocks - self.num_speculative_blocks) * self.block_size
        return tokens if self.mamba_cache_mode == "align" else np.where(tokens > 0, np.iinfo(np.int64).max, 0)


@register_kv_cache_manager(MambaSpec)
class MambaManager(SingleTypeKVCacheManager):
    """Both modes: `none` is `align` with one column for all tokens.

    A block registered in this step is never hit before `new_step_starts`: its state does not exist yet.
    """

    supports_context_parallelism: ClassVar[bool] = False
    supports_eagle: ClassVar[bool] = True
    hits_are_prefix_closed: ClassVar[bool] = False
    gives_blocks_back: ClassVar[bool] = True
    has_stable_positions: ClassVar[bool] = False
    takes_lookahead: ClassVar[bool] = False
    needs_dropped_block: ClassVar[bool] = False

    kv_cache_spec: MambaSpec

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._num_speculative = self.kv_cache_spec.num_speculative_blocks
        self._is_aligned = self.kv_cache_spec.mamba_cache_mode == "align"
        self.settings = replace(self.settings, same_step_hits=False)
        if not self._is_aligned:
            self.settings = replace(self.settings, enable_caching=False)
            self.block_size *= self.settings.max_model_len // self.block_size + 1  # no request fills it
        self._max_columns = cdiv(self.settings.max_model_len, self.block_size) + self._num_speculative
        self._has_running = np.zeros(0, bool)  # [rows] whether a row's first blocks were allocated

    # What a kind decides.

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """All but the last token: its state holds what came before."""
        return max(num_computed_tokens - 1, 0)

    def count_skipped_tokens(self, num_computed_tokens: np.ndarray) -> np.ndarray:
        """All but the last token, for int64[n] rows."""
        return np.maximum(num_computed_tokens - 1, 0)

    def tokens_until_release(self, first_live: IntOrArray) -> IntOrArray:
        """Computed tokens whose state is behind the column `first_live`."""
        return (first_live + 1) * self.block_size + 1

    def find_longest_cache_hit(self, lookup: PrefixLookup) -> np.ndarray:
        """The rightmost cached state at an aligned length, nulls before it. A dropped block need not be cached."""
        num_blocks = min(lookup.max_length // self.block_size, len(lookup.block_hashes)) - lookup.drop_last_block
        if not self._is_aligned or num_blocks < 1:
            return np.empty((self.num_groups, 0), np.int32)
        hashes = lookup.block_hashes[:num_blocks]
        ids = np.stack([self.block_pool.find_each(hashes, group_id) for group_id in self.group_ids])
        ends = np.arange(1, num_blocks + 1) * self.block_size
        for column in np.flatnonzero((ids > 0).all(axis=0) & (ends % lookup.alignment == 0))[::-1].tolist():
            if self.fresh_blocks.cut(ids[:, column]) == self.num_groups:
                return np.pad(ids[:, column : column + 1], ((0, 0), (column, 0)))
        return np.empty((self.num_groups, 0), np.int32)

    def get_num_common_prefix_blocks(self, row: int, num_running_requests: int) -> list[int]:
        """None: a state is no prefix."""
        return [0] * self.num_groups

    @property
    def max_admission_blocks(self) -> int:
        """As the spec says."""
        settings = self.settings
        return self.kv_cache_spec.max_blocks_per_request(settings.max_model_len, settings.max_in_flight_tokens)

    def checkpoint_blocks(self, drops_last_block: bool) -> CheckpointBlocks:
        """The state at the end."""
        return CheckpointBlocks(self.block_size, num_before=1, num_after=0)

    @property
    def state_blocks(self) -> StateBlocks | None:
        """Where steps must end, so that what is cached is right."""
        return StateBlocks(self.block_size, self._num_speculative) if self.settings.enable_caching else None

    # One row.

    def reserve_rows(self, num_rows: int) -> None:
        """Makes the arrays hold at least `num_rows` rows."""
        super().reserve_rows(num_rows)
        self._has_running = np.pad(self._has_running, (0, self.num_blocks.size - self._has_running.size))

    def num_blocks_for_new(self, num_slots: int, hit_ids: np.ndarray, total_computed: int, capped: bool) -> int:
        """The running state and those of drafts, one more where a state from outside ends an earlier column."""
        skipped = self.get_num_skipped_tokens(total_computed) // self.block_size
        live = hit_ids[:, skipped:]
        evictable = int((self.block_pool.ref_count[live] == 0).sum()) if live.size else 0
        has_external = total_computed > hit_ids.shape[1] * self.block_size
        enters_column = has_external and cdiv(num_slots, self.block_size) > cdiv(total_computed, self.block_size)
        return self.num_groups * (1 + self._num_speculative + enters_column) + evictable

    def num_blocks_for_running(self, row: int, num_slots: int, capped: bool = False) -> int:
        """One per group if the step enters a new column."""
        return self.num_groups * (self._columns_for(num_slots) > self.num_blocks.item(row))

    def worst_case_blocks(self, num_slots: int) -> int:
        """States from the column of the settled tokens to the running one, and those of drafts."""
        in_flight = cdiv(self.settings.max_in_flight_tokens, self.block_size) + 1
        return self.num_groups * (min(cdiv(num_slots, self.block_size), in_flight) + self._num_speculative)

    def remove_skipped_blocks(self, row: int, settled_tokens: int) -> None:
        """Gives back the states before that of the settled tokens; goes on past nulls, and never to the running one."""
        last = self.num_blocks.item(row) - 1 - self._num_speculative
        skipped = min(self.get_num_skipped_tokens(settled_tokens) // self.block_size, last)
        if skipped > self.first_live.item(row):
            self._give_back(row, skipped)
            self.first_live[row] = skipped

    def _give_back(self, row: int, end: int) -> None:
        entries = self.block_tables[:, row, self.first_live.item(row) : end]
        ids = entries[:, ::-1].astype(np.int64)
        entries[...] = 0
        self.block_pool.free_groups(ids[:, ids[0] != 0])  # groups have their nulls in the same columns

    def allocate_new_blocks(self, row: int, num_slots: int) -> np.ndarray:
        """Moves the row on to the column of `num_slots` tokens.

        Returns:
            int32[G, k] what the columns from the old end on hold now: nulls, moved blocks, new ones.
        """
        held, required = self.num_blocks.item(row), self._columns_for(num_slots)
        if required <= held:
            return np.empty((self.num_groups, 0), np.int32)
        self.reserve_columns(required)
        num_new = 1 if self._has_running[row] else 1 + self._num_speculative
        ids = self.block_pool.get_new_blocks(self.num_groups * num_new).reshape(self.num_groups, -1)
        if self._has_running[row]:
            self._move_speculative(np.array([row]), np.array([required]))
        self.block_tables[:, row, required - num_new : required] = ids
        self.num_blocks[row] = required
        self._has_running[row] = True
        return self.block_tables[:, row, held:required].copy()

    def free(self, row: int) -> None:
        """Gives all of the row's blocks back, the last first."""
        self._give_back(row, self.num_blocks.item(row))
        self.num_blocks[row] = self.num_cached_blocks[row] = self.first_live[row] = 0
        self._has_running[row] = False

    def held_slots(self, row: int) -> int:
        """Slots up to the end of the running column; speculative columns have none."""
        return (self.num_blocks.item(row) - self._num_speculative) * self.block_size

    def written_column(self, row: int, num_tokens: int) -> int | None:
        """That of the state after `num_tokens` tokens, unless it is the one at the end of its column."""
        column = self._state_column(row, num_tokens)
        return None if num_tokens == (column + 1) * self.block_size else column

    def num_blocks_for_share(self, num_rows: int) -> int:
        """Those of drafts."""
        return num_rows * self.num_groups * self._num_speculative

    def check_share(self, row: int, num_tokens: int, num_in_flight: int) -> None:
        """Raises NotImplementedError for tokens in flight, which the state holds already."""
        if num_in_flight:
            raise NotImplementedError(
                f"groups {self.group_ids}: a recurrent state holds the tokens in flight too; expected "
                f"num_in_flight_tokens = 0, got {num_in_flight}"
            )
        super().check_share(row, num_tokens, num_in_flight)

    def share_row(self, row: int, new_rows: np.ndarray, num_tokens: int) -> None:
        """Gives int64[n] new rows the state after `num_tokens` tokens, by reference, and new blocks for drafts."""
        column = cdiv(num_tokens, self.block_size) - 1
        state = self.block_tables[:, row, self._state_column(row, num_tokens)]
        self.reserve_columns(column + 1 + self._num_speculative)
        self.block_pool.touch(np.tile(state, new_rows.size))
        self.block_tables[:, new_rows, column] = state[:, None]
        new_ids = self.block_pool.get_new_blocks(self.num_blocks_for_share(new_rows.size))
        by_row = new_ids.reshape(new_rows.size, self.num_groups, -1)
        self.block_tables[:, new_rows, column + 1 : column + 1 + self._num_speculative] = by_row.swapaxes(0, 1)
        self.num_blocks[new_rows] = column + 1 + self._num_speculative
        self.num_cached_blocks[new_rows] = min(self.num_cached_blocks.item(row), num_tokens // self.block_size)
        self.first_live[new_rows] = column
        self._has_running[new_rows] = True

    def _state_column(self, row: int, num_tokens: int) -> int:
        """The column of the state after `num_tokens` tokens; the running one where that has no block."""
        column = max(num_tokens - 1, 0) // self.block_size
        return column if self.block_tables[0, row, column] else self.num_blocks.item(row) - 1 - self._num_speculative

    def _columns_for(self, num_slots: int) -> int:
        return cdiv(num_slots, self.block_size) + self._num_speculative

    # Many rows.

    def plan_rows(
        self, rows: np.ndarray, settled_tokens: np.ndarray, num_slots: np.ndarray, num_cacheable: np.ndarray
    ) -> RowChanges:
        """What one step of int64[n] rows changes: at most one new block, in the last column."""
        size, speculative = self.block_size, self._num_speculative
        held, cached, before = self.num_blocks[rows], self.num_cached_blocks[rows], self.first_live[rows]
        required, full = (num_slots + (size - 1)) // size + speculative, num_cacheable // size
        num_blocks, num_cached_blocks = np.maximum(held, required), np.maximum(cached, full)
        first = np.minimum(self.count_skipped_tokens(settled_tokens) // size, held - (1 + speculative))
        first = np.maximum(first, before)
        quiet_until = np.minimum((num_blocks - speculative) * size, self.tokens_until_release(first))
        quiet_until = np.minimum(quiet_until, self.settings.max_model_len)
        if self.settings.enable_caching:
            quiet_until = np.minimum(quiet_until, num_cached_blocks * size + (size - 1))
        return RowChanges(
            skipped=Runs.between(rows, before, first),
            needed=Runs.between(rows, np.maximum(required - 1, held), required),
            filled=Runs.between(rows, cached, full),
            num_blocks=num_blocks,
            num_cached_blocks=num_cached_blocks,
            first_live=first,
            quiet_until=quiet_until,
        )

    def attach(
        self, rows: np.ndarray, columns: np.ndarray, block_ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Moves int64[k] rows on to end at int64[k] columns, where int32[G, k] new blocks stand.

        Returns:
            Rows, columns and blocks of all columns from the old ends on.
        """
        held = self.num_blocks[rows]
        self.reserve_columns(int(columns.max()) + 1)
        self._move_speculative(rows, columns + 1)
        self.block_tables[:, rows, columns] = block_ids
        entered = Runs.between(rows, held, columns + 1)
        if entered.is_single:
            return rows, columns, block_ids
        rows, columns = entered.entries()
        return rows, columns, self.block_tables[:, rows, columns]

    def _move_speculative(self, rows: np.ndarray, num_columns: np.ndarray) -> None:
        """Moves speculative blocks that int64[k] rows of int64[k] columns leave behind to before the last column."""
        held = self.num_blocks[rows]
        moved = np.minimum(num_columns - held - 1, self._num_speculative)
        for i in range(self._num_speculative):
            own = rows[moved > i]
            source = (held - self._num_speculative + i)[moved > i]
            self.block_tables[:, own, (num_columns - 1 - moved + i)[moved > i]] = self.block_tables[:, own, source]
            self.block_tables[:, own, source] = 0

    # Checks.

    def check_invariants(self, owned_rows: Any) -> None:
        """Raises InvariantError if G1 to G3 do not hold, or a running or speculative block is missing."""
        super().check_invariants(owned_rows)
        for row in np.flatnonzero(self.num_blocks).tolist():
            end = self.num_blocks.item(row)
            if not self.block_tables[:, row, end - 1 - self._num_speculative : end].all():
                raise InvariantError(f"G2, groups {self.group_ids}: row {row} lacks a running or speculative block")
