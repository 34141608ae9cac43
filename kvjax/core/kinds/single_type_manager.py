"""Blocks of the KV-cache groups of one spec: who holds which, what a request needs, what may be released.

Flow:    KVCacheCoordinator -> [SingleTypeKVCacheManager] -> BlockPool
Source:  vLLM v1/core/single_type_kv_cache_manager.py; state as arrays by row: ARCHITECTURE.md, "Host core"

Groups of equal spec in one pool always hold equally many blocks, so one manager keeps one count and G block tables.
A row's part of a table, columns in token order (`block_size` tokens a column):

    | null ... null | held ......................... | null padding |
    0               first_live          num_blocks   columns
    | registered in the prefix cache: num_cached_blocks |

Leading columns that a kind keeps are no nulls: `kept_columns.py`, `rswa.py`. Which tokens later ones see, and who may
hit them, the spec says; its functions take the numbers of one row or of many. What is done to a table exists for one
row (`allocate_slots`) and for many (`plan_step`). Ids of several groups come group by group. What a column is, a family
says; no class overrides what another has filled in:

    SingleTypeKVCacheManager       tables, registration, release: all kinds
        ColumnManager              blocks are appended as slots grow                    columns.py
            PositionalManager      a column is the request's own tokens                 positional.py
            EncoderManager         a column is the encoder's tokens                     encoder_columns.py
        RecurrentManager           a column is a state of all tokens before its end     recurrent.py

Invariants: G1 to G3 of `table_laws.py` (`check_invariants`).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from kvjax.core.kinds.answer_columns import AnswerColumns
from kvjax.core.kinds.answer_states import AnswerStates
from kvjax.core.kinds.checkpoint_columns import CheckpointColumns
from kvjax.core.kinds.common_prefix import count_common_blocks
from kvjax.core.kinds.inner_states import InnerStates
from kvjax.core.kinds.kept_columns import hold_kept
from kvjax.core.kinds.manager_settings import ManagerSettings, TableLayout
from kvjax.core.kinds.prefix_lookup import HitScan, PrefixLookup
from kvjax.core.kinds.probation import put_on_probation
from kvjax.core.kinds.reserved_blocks import take_reserved_blocks
from kvjax.core.kinds.rswa import PromptColumns
from kvjax.core.kinds.state_steps import StateBlocks
from kvjax.core.kinds.sub_block_index import SubBlockIndex
from kvjax.core.kinds.table_laws import check_tables
from kvjax.core.pool.block_ids import without_null
from kvjax.core.spec import NEVER, KVCacheSpec, cdiv
from kvjax.core.tables.column_runs import Runs
from kvjax.core.tables.ints_or_arrays import IntOrArray
from kvjax.core.tables.row_changes import RowChanges
from kvjax.core.tables.row_table import DISCARD_ENTRIES, RowTable
from kvjax.core.watch.computed_blocks import ComputedBlocks

if TYPE_CHECKING:
    from kvjax.core.hashing.block_hash import BlockHash
    from kvjax.core.pool.block_pool import BlockPool
    from kvjax.core.pool.fresh_blocks import FreshBlocks
    from kvjax.core.requests.request import Request

FEW_COLUMNS = 6  # so many blocks of a row are registered faster one by one
Entries: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]  # int64[k] rows, int64[k] columns, int32[G, k] blocks


class SingleTypeKVCacheManager(abc.ABC):
    """Block tables and accounting of the G groups of one spec. Owned by a coordinator; not thread-safe.

    `block_size` counts context parallelism in: one block id stands for `spec.block_size` tokens on each of its ranks.
    """

    holds_states: ClassVar[bool] = False  # whether a column is one state, of all tokens before its end
    supports_sub_block_hits: ClassVar[bool] = False  # whether the first part of a block is of use without the rest

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        block_pool: BlockPool,
        group_ids: tuple[int, ...],
        settings: ManagerSettings,
        fresh_blocks: FreshBlocks,
    ) -> None:
        """Empty tables; the blocks that the spec reserves are taken from the pool.

        Raises:
            NotImplementedError: the kind does not work with context parallelism.
            ValueError: the pool lacks the reserved blocks, or they do not divide among the ranks.
        """
        if settings.context_parallel_size > 1 and not kv_cache_spec.supports_context_parallelism:
            raise NotImplementedError(
                f"{kv_cache_spec.kind} attention does not work with context parallelism, "
                f"got dcp_world_size * pcp_world_size = {settings.context_parallel_size}; expected 1"
            )
        self.kv_cache_spec, self.block_pool = kv_cache_spec, block_pool
        self.forgets, self.is_prefix_cacheable = kv_cache_spec.forgets, kv_cache_spec.is_prefix_cacheable
        self.group_ids, self.num_groups = group_ids, len(group_ids)  # G
        self.no_blocks = np.empty((self.num_groups, 0), np.int32)
        self.settings, self.fresh_blocks = settings, fresh_blocks
        layout = self.table_layout()
        self.block_size = layout.block_size
        self.enable_caching = layout.enable_caching
        self.same_step_hits = layout.same_step_hits
        self.num_tail_columns = layout.num_tail_columns
        # Blocks of one group beyond which the admission of a whole sequence counts no need.
        self.max_admission_blocks = kv_cache_spec.max_blocks_per_request(
            settings.max_model_len, settings.max_in_flight_tokens
        )
        # Leading columns that are never released before the request ends.
        self.num_kept_columns = cdiv(kv_cache_spec.num_sink_tokens, self.block_size)
        # Those of each row's prompt, where only blocks of the answer are released; None: as the lines above say.
        self.prompt_columns: PromptColumns | None = None
        if kv_cache_spec.rswa_window is not None:
            as_vllm = settings.options.rules.rswa_as_vllm
            num_in_flight = None if as_vllm else settings.max_in_flight_tokens
            self.prompt_columns = PromptColumns(kv_cache_spec.rswa_window + as_vllm, self.block_size, num_in_flight)
        self.releases = self.forgets or self.prompt_columns is not None  # blocks before their requests end
        self.keeps_columns = self.num_kept_columns > 0 or self.prompt_columns is not None
        self._has_gaps = self.holds_states or self.keeps_columns  # whether there are nulls between
        self.max_columns = cdiv(settings.max_model_len, self.block_size) + max(self.num_tail_columns - 1, 0)
        self._table = RowTable(len(group_ids), 0, self.max_columns)
        self.num_blocks = self._table.lengths  # int64[rows]
        self.num_cached_blocks = np.zeros(0, np.int64)  # [rows]
        self.first_live = np.zeros(0, np.int64)  # [rows] leading columns that are null, but for those kept
        self.sub_blocks: SubBlockIndex | None = None
        if settings.options.sub_block_hits and self.supports_sub_block_hits:
            self.sub_blocks = SubBlockIndex(self.block_size, block_pool, group_ids)
        self.checkpoints: CheckpointColumns | None = None  # None: every block is registered
        # of states that are kept at checkpoints
        self.answer_columns: AnswerColumns | None = None
        self.answer_states: AnswerStates | None = None
        self.inner_states: InnerStates | None = None  # of states that are kept where no block ends
        self.first_copies: dict[int, int] = {}  # `inner_copies.py`
        self.computed_blocks: ComputedBlocks | None = None  # is told of all, where someone asks why lookups miss
        # int32[G, k] held for good outside the tables
        self.reserved_block_ids = take_reserved_blocks(kv_cache_spec, block_pool, group_ids, self.block_size)

    # What a family decides: the layout of tables.

    @abc.abstractmethod
    def table_layout(self) -> TableLayout:
        """The layout of `kv_cache_spec` under `settings`; no other attribute exists yet when it is called."""

    @abc.abstractmethod
    def find_misplaced(self, is_block: np.ndarray, inside: np.ndarray) -> str | None:
        """What G2 wants and bool[G, rows, columns] blocks break; None: nothing. `inside`: bool[rows, columns]."""

    @property
    @abc.abstractmethod
    def state_blocks(self) -> StateBlocks | None:
        """What these groups ask of steps, where their blocks hold states."""

    @property
    @abc.abstractmethod
    def max_encoder_tokens(self) -> int:
        """Most encoder tokens of a request that these groups hold."""

    @abc.abstractmethod
    def slots_of(self, num_slots: int, num_encoder_tokens: int) -> int:
        """Slots that a new request takes in these groups."""

    @abc.abstractmethod
    def start_scan(self, lookup: PrefixLookup) -> HitScan:
        """Looks for hits.

        A hit has L tokens, a multiple of the alignment and at most the limit (less a block, if the last is dropped).
        Every block that the tokens from L on attend to is cached. So is the dropped one, and the last one if the
        lookup needs it.
        """

    # What a family does with one row.

    @abc.abstractmethod
    def num_blocks_for_new(self, num_slots: int, hit_ids: np.ndarray, total_computed: int, capped: bool) -> int:
        """Free blocks that a first allocation takes: new ones, and hits that leave the free queue when touched.

        Args:
            num_slots: tokens that need a slot, those computed included.
            hit_ids: int32[G, k] blocks of the hit.
            total_computed: tokens already computed, found and loaded from outside.
            capped: whether the admission cap of the kind applies.
        """

    @abc.abstractmethod
    def num_blocks_for_running(self, row: int, num_slots: int, capped: bool = False) -> int:
        """Free blocks that the row still needs for `num_slots` slots; 0 if rejected drafts left more than enough."""

    @abc.abstractmethod
    def worst_case_blocks(self, num_slots: int) -> int:
        """Most blocks that all groups together hold at once of a request that never has more than `num_slots` slots."""

    @abc.abstractmethod
    def allocate_new_blocks(self, row: int, num_slots: int) -> np.ndarray:
        """Takes new blocks until the row has `num_slots` slots.

        Returns:
            int32[G, k] what the columns from the old end on hold.
        """

    @abc.abstractmethod
    def held_slots(self, row: int) -> int:
        """Slots in the row's blocks."""

    @abc.abstractmethod
    def written_column(self, row: int, num_tokens: int) -> int | None:
        """The column of a block that a row of `num_tokens` computed tokens has and writes to next; None: a new one."""

    @abc.abstractmethod
    def num_blocks_for_share(self, num_rows: int) -> int:
        """Free blocks that `share_row` takes for so many new rows."""

    @abc.abstractmethod
    def share_row(self, row: int, new_rows: np.ndarray, num_tokens: int) -> None:
        """Gives int64[n] new rows the blocks of the row's first `num_tokens` tokens, by reference."""

    # What a family does with many rows.

    @abc.abstractmethod
    def plan_rows(
        self, rows: np.ndarray, settled_tokens: np.ndarray, num_slots: np.ndarray, num_cacheable: np.ndarray
    ) -> RowChanges:
        """What one step of int64[n] rows changes, as `remove_skipped_blocks`, `allocate_new_blocks` and `cache_blocks`.

        Each row's changes depend on that row alone; nothing is changed yet.
        """

    @abc.abstractmethod
    def attach(self, rows: np.ndarray, columns: np.ndarray, block_ids: np.ndarray) -> Entries:
        """Writes int32[G, k] new blocks into the tables at int64[k] rows and columns; all entries that rows gained."""

    @abc.abstractmethod
    def take_back(self, rows: np.ndarray, num_tokens: np.ndarray, num_kept: np.ndarray) -> Entries:
        """Lets int64[n] rows with `num_tokens` computed tokens go on from fewer, >= 1; the entries that changed."""

    @abc.abstractmethod
    def move_back(self, row: int, num_tokens: int) -> None:
        """Brings a row that was planned further back to its `num_tokens` >= 1 computed tokens."""

    # What the kind decides, of one row or of int64[n] rows.

    def get_num_skipped_tokens(self, num_computed_tokens: IntOrArray) -> IntOrArray:
        """`KVCacheSpec.skipped_tokens`."""
        return self.kv_cache_spec.skipped_tokens(num_computed_tokens)

    def get_num_released_tokens(self, settled_tokens: IntOrArray) -> IntOrArray:
        """Leading tokens whose blocks a running row with so many settled tokens releases, but for those kept."""
        if self.prompt_columns is not None:
            return self.prompt_columns.skipped_tokens(settled_tokens)
        return self.get_num_skipped_tokens(settled_tokens)

    def tokens_until_release(self, first_live: IntOrArray) -> IntOrArray:
        """Fewest computed tokens at which the block behind `first_live` columns is released (or `NEVER`)."""
        if self.prompt_columns is not None:
            return self.prompt_columns.tokens_until_skipped((first_live + 1) * self.block_size)
        return self.kv_cache_spec.tokens_until_skipped((first_live + 1) * self.block_size)

    def kept_columns_of(self, row: IntOrArray) -> int | IntOrArray:
        """Leading columns of a row, or of each of int64[n] rows, that are never released before the request ends."""
        if self.prompt_columns is None:
            return self.num_kept_columns
        counts = self.prompt_columns.counts
        return counts.item(row) if isinstance(row, int) else counts[row]

    # Table memory.

    @property
    def reads_encoder(self) -> bool:
        """Whether slots are the encoder's tokens."""
        return self.kv_cache_spec.reads_encoder

    @property
    def block_tables(self) -> np.ndarray:  # int32[G, rows, columns]
        """The groups' block tables, replaced when they grow; memory is that of the columns that rows hold."""
        return self._table.entries

    def reserve_rows(self, num_rows: int) -> None:
        """Makes the arrays hold at least `num_rows` rows."""
        missing = num_rows - self.num_blocks.size
        if missing > 0:
            self._table.reserve_rows(num_rows)
            self.num_blocks = self._table.lengths
            self.num_cached_blocks = np.pad(self.num_cached_blocks, (0, missing))
            self.first_live = np.pad(self.first_live, (0, missing))
            if self.answer_states is not None:
                self.answer_states.reserve_rows(num_rows)
            if self.prompt_columns is not None:
                self.prompt_columns.reserve_rows(num_rows)

    # One row.

    def remove_skipped_blocks(self, row: int, settled_tokens: int) -> None:
        """Releases what no token after the first `settled_tokens` attends to; the last block is evicted first."""
        start, end = self.first_live.item(row), self.num_blocks.item(row) - self.num_tail_columns
        skipped = min(self.get_num_released_tokens(settled_tokens) // self.block_size, end)
        if skipped > start:
            kept = self.kept_columns_of(row)
            self._release(row, max(start, kept), skipped)
            self._table.discard_behind(row, max(start, _first_discarded(kept)), skipped)
            self.first_live[row] = skipped

    def _release(self, row: int, start: int, end: int) -> None:
        """Releases the blocks in the row's columns from `start` to `end`, the last first."""
        if start >= end:
            return
        entries = self._table.entries[:, row, start:end]
        ids = entries[:, ::-1]
        if self._has_gaps:
            ids = ids[:, ids[0] != 0]  # groups have their nulls in the same columns
        self.block_pool.free_held(ids)
        entries.fill(0)

    def add_computed_blocks(self, row: int, hit_ids: np.ndarray, total_computed: int) -> None:
        """First phase of a first allocation: holds the hit's blocks that the window still sees, nulls before them."""
        skipped = self.get_num_skipped_tokens(total_computed) // self.block_size
        live = hit_ids[:, skipped:]
        if live.size:
            self.block_pool.touch(live.ravel())
        count = skipped + live.shape[1]
        self._table.reserve_columns(count)
        self._table.entries[:, row, skipped:count] = live
        self.num_blocks[row] = self.num_cached_blocks[row] = count
        self.first_live[row] = skipped
        hold_kept(self, row, hit_ids, skipped)

    def cache_blocks(self, request: Request, row: int, block_hashes: Sequence[BlockHash], num_tokens: int) -> None:
        """Registers the row's blocks that the first `num_tokens` tokens fill. Null blocks are passed over.

        `block_hashes` are the request's at this block size.
        """
        full = self.full_column(row, num_tokens)
        cached = self.num_cached_blocks.item(row)
        if full <= cached:
            return
        blocks = self._blocks_to_register(row, cached, full)
        if self.block_pool.prefix_index.inner:
            self.block_pool.evict_blocks(blocks.ravel())  # of fewer tokens than they have now
        if self.block_pool.enable_kv_cache_events:
            for group_id, ids in zip(self.group_ids, blocks, strict=True):
                self.block_pool.cache_full_blocks(request, ids, block_hashes, cached, group_id)
        elif full <= cached + FEW_COLUMNS:
            hashes = block_hashes[cached:full]
            for group_id, few in zip(self.group_ids, blocks.tolist(), strict=True):
                self.block_pool.register_few(few, hashes, cached, group_id)
        else:
            columns = np.arange(cached, full)
            self._register_real(blocks, columns, np.fromiter(block_hashes[cached:full], np.object_, full - cached))
        if self.checkpoints is not None:
            for first, end in self.checkpoints.stretches_on_probation(row, cached, full):
                ids = blocks[:, first - cached : end - cached].ravel()
                put_on_probation(self.block_pool, without_null(ids))
        if self.answer_columns is not None and full * self.block_size > self.answer_columns.longest_of(row):
            self._note_answer(row, full - 1, blocks, block_hashes)
        if not self.same_step_hits:
            self.fresh_blocks.add(blocks[blocks != 0])
        if self.computed_blocks is not None:
            self.computed_blocks.add(block_hashes[cached:full])
        if self.block_pool.origins is not None:
            self.block_pool.origins.note(self.block_tables[:, row, cached:full], request.origin)
        self.num_cached_blocks[row] = full
        if self.sub_blocks is not None:
            self.sub_blocks.add(request, block_hashes, cached, full)

    def _note_answer(self, row: int, column: int, blocks: np.ndarray, block_hashes: Sequence[BlockHash]) -> None:
        """The last of int32[G, n] registered blocks, in that column, is a state behind the row's checkpoints."""
        if self.answer_states is not None and blocks[0, -1]:
            last_hash = np.fromiter(block_hashes[column : column + 1], np.object_, 1)
            self.answer_states.add(np.array([row]), np.array([column]), blocks[:, -1:].copy(), last_hash)

    def _blocks_to_register(self, row: int, start: int, end: int) -> np.ndarray:  # int32[G, end - start]
        """The row's blocks from column `start` on, null where no checkpoint keeps them."""
        ids = self._table.entries[:, row, start:end]
        if self.checkpoints is None or self.checkpoints.keeps_every_block:
            return ids
        return ids * self.checkpoints.find_kept(np.array([row]), np.arange(start, end))

    def _register_real(self, ids: np.ndarray, columns: np.ndarray, block_hashes: np.ndarray) -> None:
        if (real := self._places_with_blocks(ids)) is not None:
            ids, block_hashes, columns = ids[:, real], block_hashes[real], columns[real]
        self.block_pool.register_rows(ids, block_hashes, columns, self.group_ids)

    def _places_with_blocks(self, ids: np.ndarray) -> np.ndarray | None:
        """int64[k] places of int32[G, n] entries that are no nulls; None: all. Nulls are in the same columns."""
        return ids[0].nonzero()[0] if self.releases and np.count_nonzero(ids) < ids.size else None

    def free(self, row: int) -> None:
        """Releases all of the row's blocks, the last first, so that a shared prefix lives longest."""
        end = self.num_blocks.item(row)
        self._release(row, 0 if self.keeps_columns else self.first_live.item(row), end)
        self._table.discard_row(row, end)
        self.num_blocks[row] = self.num_cached_blocks[row] = self.first_live[row] = 0
        self.first_copies.pop(row, None)
        if self.prompt_columns is not None:
            self.prompt_columns.begin(row, 0)
        if self.answer_states is not None:
            self.answer_states.leave(row)
        if self.inner_states is not None:
            self.inner_states.leave(row)

    def check_share(self, row: int, num_tokens: int, num_in_flight: int) -> None:
        """Checks that a row has the blocks that go on from its first `num_tokens` tokens.

        Raises:
            ValueError: it does not.
            NotImplementedError: tokens are in flight, and what they wrote is in a state with all before them.
        """
        if num_in_flight and self.holds_states:
            raise NotImplementedError(
                f"groups {self.group_ids}: a recurrent state holds the tokens in flight too; expected "
                f"num_in_flight_tokens = 0, got {num_in_flight}"
            )
        if num_tokens > self.held_slots(row):
            raise ValueError(
                f"row {row}: expected blocks of the {num_tokens} tokens to share, got {self.held_slots(row)} slots"
            )
        if self.first_live[row] > self.get_num_released_tokens(num_tokens) // self.block_size:
            raise ValueError(
                f"row {row}: blocks that token {num_tokens} attends to were released; expected fewer "
                "num_in_flight_tokens, or as many when the slots were allocated"
            )

    def row_block_ids(self, row: int) -> np.ndarray:
        """int32[G, k] copy of the row's blocks, nulls where they were released."""
        return self.block_tables[:, row, : self.num_blocks.item(row)].copy()

    def get_num_common_prefix_blocks(self, row: int, num_running_requests: int) -> list[int]:
        """Per group the leading blocks of the row that all `num_running_requests` hold; 0 where blocks are left behind
        or nobody else may hold them.
        """
        if self.releases or not self.is_prefix_cacheable:
            return [0] * self.num_groups
        return count_common_blocks(
            self.block_tables, self.num_blocks, self.block_pool.ref_count, row, num_running_requests
        )

    def held_block_ids(self) -> np.ndarray:
        """int32[k] all entries of all rows."""
        return self._table.owned()

    def row_idle_until(self, row: int) -> int:
        """Slots up to which a step of the row neither allocates, registers nor releases in these groups."""
        idle = self.held_slots(row)
        if self.releases:
            idle = min(idle, self.tokens_until_release(max(self.first_live.item(row), self.kept_columns_of(row))))
        if self.enable_caching:
            idle = min(idle, self.next_full(row) - 1)
        return idle

    def end_column(self, row: IntOrArray, num_tokens: IntOrArray) -> IntOrArray:
        """How many columns end where that of the last of so many tokens does."""
        if self.answer_columns is None:
            return -(-num_tokens // self.block_size)
        return self.answer_columns.end(self.answer_columns.longest_of(row), num_tokens)

    def full_column(self, row: IntOrArray, num_tokens: IntOrArray) -> IntOrArray:
        """How many columns may be registered of a row with so many tokens that have hashes."""
        if self.answer_columns is None:
            return num_tokens // self.block_size
        return self.answer_columns.full(self.answer_columns.longest_of(row), num_tokens)

    def next_full(self, row: int) -> int:
        """The fewest tokens with which another column of the row may be registered."""
        cached = self.num_cached_blocks.item(row)
        if self.answer_columns is None:
            return (cached + 1) * self.block_size
        return self.answer_columns.next_full(self.answer_columns.longest_of(row), cached)

    # Many rows.

    def detach(self, skipped: Runs) -> np.ndarray:
        """Puts nulls there and returns int32[G, k] the blocks that were there, still held; a row's last come first."""
        rows, columns = skipped.entries(descending=True)
        ids = self.block_tables[:, rows, columns]
        self.block_tables[:, rows, columns] = 0
        if self._table.has_long_rows:
            starts = np.maximum(skipped.starts, _first_discarded(self.kept_columns_of(skipped.rows)))
            self._table.discard_behind_n(skipped.rows, starts, skipped.starts + skipped.counts)
        return ids

    def find_registered(self, rows: np.ndarray, columns: np.ndarray) -> Entries:
        """Those of int64[k] rows and columns whose blocks are registered: neither null nor without a checkpoint."""
        if self.checkpoints is not None and not self.checkpoints.keeps_every_block:
            kept = self.checkpoints.find_kept(rows, columns)
            rows, columns = rows[kept], columns[kept]
        ids = self._table.entries[:, rows, columns]
        if (real := self._places_with_blocks(ids)) is not None:
            return rows[real], columns[real], ids[:, real]
        return rows, columns, ids

    def register(self, entries: Entries, block_hashes: np.ndarray) -> None:
        """Registers k blocks of each group, `find_registered`, under object[k] hashes."""
        rows, columns, ids = entries
        self.block_pool.register_rows(ids, block_hashes, columns, self.group_ids)
        if self.checkpoints is not None and self.checkpoints.has_probation:
            own = self.checkpoints.find_own(rows, columns)
            put_on_probation(self.block_pool, ids if own is None else ids[:, ~own])
        if self.answer_states is not None:
            self.answer_states.add(rows, columns, ids, block_hashes)
        if not self.same_step_hits:
            self.fresh_blocks.add(ids.ravel())

    def note_changes(self, rows: np.ndarray, changes: RowChanges) -> None:
        """Makes the counts of int64[n] changed rows what `plan_rows` said."""
        self.num_blocks[rows] = changes.num_blocks
        self.num_cached_blocks[rows] = changes.num_cached_blocks
        if self.releases:
            self.first_live[rows] = changes.first_live

    # Lookup.

    def retain(self, checkpoints: CheckpointColumns) -> None:
        """From now on registers only what checkpoints keep."""
        keeps_all = checkpoints.keeps_every_block and not checkpoints.has_probation
        self.checkpoints = None if keeps_all else checkpoints
        if self.holds_states and checkpoints.has_probation and checkpoints.retention is not None:
            columns = AnswerColumns.of(checkpoints.retention, self.block_size, self.settings.max_model_len)
            self.answer_columns = columns
            self.answer_states = AnswerStates(self.block_pool, self.num_groups, columns)

    def hits_need_blocks(self) -> bool:
        """Whether the token after a hit of any length sees a block before it; not where it begins a chunk."""
        if self.num_kept_columns:
            return True
        ends = np.arange(self.block_size, self.settings.max_model_len + 1, self.block_size)
        return bool((self.get_num_skipped_tokens(ends) < ends).all())

    def find_longest_cache_hit(self, lookup: PrefixLookup) -> np.ndarray:
        """int32[G, k] ids of the longest hit of at most `max_length` tokens, null where a block is not needed."""
        scan = self.start_scan(lookup)
        return scan.ids() if scan.longest(lookup.max_length) else self.no_blocks

    def computes_again(self, group_id: int, block_id: int) -> bool:
        """Whether a state of the same tokens as a cached block's was registered in this step."""
        block_hash = self.block_pool.block_hash_of(block_id) if self.holds_states else None
        if block_hash is None:
            return False
        copies = np.array(self.block_pool.hash_maps[group_id].get_blocks(block_hash), np.int64)
        return bool(self.fresh_blocks.are_fresh(copies).any())

    def cached_run(self, block_hashes: Sequence[BlockHash], limit: int = NEVER) -> np.ndarray:
        """int32[G, k] blocks of the longest leading run of hashes, `limit` at most, that every group has cached."""
        runs: list[np.ndarray] = []
        for group_id in self.group_ids:
            run = self.block_pool.find_run(block_hashes, group_id, limit)
            limit = self.fresh_blocks.cut(run)
            if not limit:
                return self.no_blocks
            runs.append(run)
        if len(runs) == 1:
            return runs[0][None, :limit]
        return np.stack([run[:limit] for run in runs])

    # Checks.

    def check_invariants(self, owned_rows: Sequence[int]) -> None:
        """Raises InvariantError if G1 to G3 do not hold for these groups, or S1 of `SubBlockIndex`."""
        check_tables(self, owned_rows)
        if self.sub_blocks is not None:
            self.sub_blocks.check_invariants()


def _first_discarded(num_kept: Any) -> Any:
    """The first column behind so many kept ones, an int or int64[n], whose memory goes back to the system."""
    return -(-num_kept // DISCARD_ENTRIES) * DISCARD_ENTRIES
