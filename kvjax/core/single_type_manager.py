"""Blocks of one KV-cache group: who holds which, what a request needs, what may be given back.

Flow:    KVCacheCoordinator -> [SingleTypeKVCacheManager] -> BlockPool
Source:  vLLM v1/core/single_type_kv_cache_manager.py; state as arrays by row: ARCHITECTURE.md, "Host core"

A row's part of the block table, columns in token order (`b` tokens a column):

    | null ... null | held ......................... | null padding |
    0               first_live          num_blocks   columns
    | registered in the prefix cache: num_cached |

Every operation exists twice with one meaning: for one row as ints (`allocate_slots`), for many rows as arrays
(`plan_step`). A kind fills in the abstract methods only; `kinds/registry.py` finds the manager of a spec.

Invariants (`check_invariants`):

    G1  0 <= first_live <= num_blocks <= columns, and num_cached <= num_blocks
    G2  a row's entries are the null block outside [first_live, num_blocks) and a block of the pool inside
    G3  a row that no request owns is all zero
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np

from kvjax.core.kv_cache_blocks import NO_BLOCK_IDS
from kvjax.core.spec import KVCacheSpec, cdiv
from kvjax.errors import InvariantError

if TYPE_CHECKING:
    from kvjax.core.block_hash import BlockHash
    from kvjax.core.block_pool import BlockPool
    from kvjax.core.fresh_blocks import FreshBlocks
    from kvjax.core.request import Request

NEVER = 1 << 60  # a token count that no request reaches
IntOrArray = TypeVar("IntOrArray", int, np.ndarray)


@dataclass(frozen=True, kw_only=True)
class ManagerSettings:
    """What the managers of all groups have in common."""

    enable_caching: bool
    max_model_len: int
    max_in_flight_tokens: int
    context_parallel_size: int = 1
    same_step_hits: bool = True


@dataclass(frozen=True)
class PrefixLookup:
    """One question to the prefix cache, about groups of equal spec in one pool."""

    block_hashes: Sequence[BlockHash]  # of the groups' block size
    max_length: int  # tokens; a hit is no longer
    group_ids: tuple[int, ...]
    alignment: int  # tokens; a hit's length is a multiple
    drop_last_block: bool  # EAGLE: the block after the hit must be cached too, and is computed again


@dataclass(frozen=True)
class Spans:
    """A run of table columns for each of n rows."""

    rows: np.ndarray  # int64[n] distinct
    starts: np.ndarray  # int64[n] first column
    counts: np.ndarray  # int64[n] >= 1 columns

    def entries(self, *, descending: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns int64[sum of counts], row by row."""
        return self.spread(self.rows), self.run(self.starts, descending=descending)

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Each of int64[n] values as often as its row has columns."""
        return values if self.is_single else np.repeat(values, self.counts)

    def run(self, starts: np.ndarray, *, descending: bool = False) -> np.ndarray:
        """Per row the integers from int64[n] `starts` on, as many as it has columns."""
        if self.is_single:
            return starts
        inner = np.arange(self.counts.sum()) - self.spread(np.cumsum(self.counts) - self.counts)
        return self.spread(starts) + (self.spread(self.counts) - 1 - inner if descending else inner)

    @property
    def is_single(self) -> bool:
        """Whether no row has more than one column, as in decoding."""
        return self.counts.size == 0 or int(self.counts.max()) == 1


class SingleTypeKVCacheManager(abc.ABC):
    """Block table and accounting of one group. Owned by a coordinator; not thread-safe.

    `block_size` counts context parallelism in: one block id stands for `spec.block_size` tokens on each of its ranks.
    """

    supports_context_parallelism: ClassVar[bool]
    supports_eagle: ClassVar[bool]
    hits_are_prefix_closed: ClassVar[bool]  # every shorter aligned prefix of a hit is a hit

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        block_pool: BlockPool,
        kv_cache_group_id: int,
        settings: ManagerSettings,
        fresh_blocks: FreshBlocks,
    ) -> None:
        if settings.context_parallel_size > 1 and not self.supports_context_parallelism:
            raise NotImplementedError(
                f"{kv_cache_spec.kind} attention does not work with context parallelism, "
                f"got dcp_world_size * pcp_world_size = {settings.context_parallel_size}; expected 1"
            )
        self.kv_cache_spec = kv_cache_spec
        self.block_pool = block_pool
        self.kv_cache_group_id = kv_cache_group_id
        self.settings = settings
        self.fresh_blocks = fresh_blocks
        self.block_size = kv_cache_spec.block_size * settings.context_parallel_size
        self.block_table = np.zeros((0, 0), np.int32)  # [rows, columns]
        self.num_blocks = np.zeros(0, np.int64)  # [rows]
        self.num_cached_blocks = np.zeros(0, np.int64)  # [rows]
        self.first_live = np.zeros(0, np.int64)  # [rows] leading null blocks

    # What a kind decides.

    @abc.abstractmethod
    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that no token after the first `num_computed_tokens` will attend to."""

    @abc.abstractmethod
    def count_skipped_tokens(self, num_computed_tokens: np.ndarray) -> np.ndarray:
        """`get_num_skipped_tokens` of int64[n] at once."""

    @abc.abstractmethod
    def tokens_until_release(self, first_live: IntOrArray) -> IntOrArray:
        """Fewest computed tokens at which a row with `first_live` leading nulls gives a block back (or `NEVER`)."""

    @abc.abstractmethod
    def find_longest_cache_hit(self, lookup: PrefixLookup) -> tuple[np.ndarray, ...]:
        """Per group of the lookup int32[k] ids of the longest hit, null where a block is not needed.

        The hit is the longest L with L a multiple of the alignment, L (plus a block if the last is dropped) at most
        `max_length`, and every block cached that the tokens from L on attend to (and the dropped one).
        """

    @abc.abstractmethod
    def get_num_common_prefix_blocks(self, row: int, num_running_requests: int) -> int:
        """Leading blocks of the row that all `num_running_requests` hold."""

    @property
    @abc.abstractmethod
    def max_admission_blocks(self) -> int:
        """Blocks beyond which the admission of a whole sequence counts no need (`NEVER`: no bound)."""

    # Table memory.

    def reserve_rows(self, num_rows: int) -> None:
        """Makes the arrays hold at least `num_rows` rows."""
        missing = num_rows - self.num_blocks.size
        if missing > 0:
            self.block_table = np.pad(self.block_table, ((0, missing), (0, 0)))
            self.num_blocks = np.pad(self.num_blocks, (0, missing))
            self.num_cached_blocks = np.pad(self.num_cached_blocks, (0, missing))
            self.first_live = np.pad(self.first_live, (0, missing))

    def reserve_columns(self, num_columns: int) -> None:
        """Makes the table hold at least `num_columns` columns; they double."""
        columns = self.block_table.shape[1]
        if num_columns > columns:
            grown = min(max(2 * columns, num_columns, 16), max(num_columns, self.max_columns))
            self.block_table = np.pad(self.block_table, ((0, 0), (0, grown - columns)))

    @property
    def max_columns(self) -> int:
        """Columns of a request of `max_model_len` tokens."""
        return cdiv(self.settings.max_model_len, self.block_size)

    # One row.

    def num_blocks_for_new(self, num_slots: int, hit_ids: np.ndarray, total_computed: int, capped: bool) -> int:
        """Free blocks that a first allocation takes: new ones, and hits that leave the free queue when touched.

        Args:
            num_slots: tokens that need a slot, those computed included.
            hit_ids: int32[k] blocks of the hit.
            total_computed: tokens already computed, found and loaded from outside.
            capped: whether the admission cap of the kind applies.
        """
        required = cdiv(num_slots, self.block_size)
        if capped:
            required = min(required, self.max_admission_blocks)
        skipped = self.get_num_skipped_tokens(total_computed) // self.block_size
        live = hit_ids[skipped:]
        evictable = int(((self.block_pool.ref_count[live] == 0) & (live != 0)).sum()) if live.size else 0
        return max(required - max(skipped, hit_ids.size), 0) + evictable

    def num_blocks_for_running(self, row: int, num_slots: int, capped: bool = False) -> int:
        """Free blocks that the row still needs for `num_slots` slots; 0 if rejected drafts left more than enough."""
        required = cdiv(num_slots, self.block_size)
        if capped:
            required = min(required, self.max_admission_blocks)
        return max(required - self.num_blocks.item(row), 0)

    def remove_skipped_blocks(self, row: int, settled_tokens: int) -> None:
        """Gives back what no token after the first `settled_tokens` attends to; the last block is evicted first."""
        skipped = min(self.get_num_skipped_tokens(settled_tokens) // self.block_size, self.num_blocks.item(row))
        first = self.first_live.item(row)
        if skipped <= first:
            return
        entries = self.block_table[row, first:skipped]
        ids = entries[::-1].copy()
        entries[:] = 0
        self.first_live[row] = skipped
        self.block_pool.free_blocks(ids)

    def add_computed_blocks(self, row: int, hit_ids: np.ndarray, total_computed: int) -> None:
        """First phase of a first allocation: holds the hit's blocks that the window still sees, nulls before them."""
        skipped = self.get_num_skipped_tokens(total_computed) // self.block_size
        live = hit_ids[skipped:]
        if live.size:
            self.block_pool.touch(live)
        count = skipped + live.size
        self.reserve_columns(count)
        self.block_table[row, skipped:count] = live
        self.num_blocks[row] = count
        self.num_cached_blocks[row] = count
        self.first_live[row] = skipped

    def allocate_new_blocks(self, row: int, num_slots: int) -> np.ndarray:
        """Appends new blocks until the row has `num_slots` slots.

        Returns:
            int32[k] their ids.
        """
        held = self.num_blocks.item(row)
        required = cdiv(num_slots, self.block_size)
        if required <= held:
            return NO_BLOCK_IDS
        if required > self.block_table.shape[1]:
            self.reserve_columns(required)
        ids = self.block_pool.get_new_blocks(required - held)
        self.block_table[row, held:required] = ids
        self.num_blocks[row] = required
        return ids

    def cache_blocks(self, request: Request, row: int, block_hashes: Sequence[BlockHash], num_tokens: int) -> None:
        """Registers the row's blocks that the first `num_tokens` tokens fill. Null blocks are passed over.

        `block_hashes` are the request's at this group's block size.
        """
        full = num_tokens // self.block_size
        cached = self.num_cached_blocks.item(row)
        if full <= cached:
            return
        ids = self.block_table[row, cached:full]
        self.block_pool.cache_full_blocks(request, ids, block_hashes, cached, self.kv_cache_group_id)
        self.num_cached_blocks[row] = full
        self.note_registered(ids)

    def note_registered(self, block_ids: np.ndarray) -> None:
        """Remembers int32[k] blocks as not to be hit in this step, where the settings ask for it."""
        if not self.settings.same_step_hits:
            self.fresh_blocks.add(block_ids[block_ids != 0].astype(np.int64))

    def free(self, row: int) -> None:
        """Gives all of the row's blocks back, the last first, so that a shared prefix lives longest."""
        count = self.num_blocks.item(row)
        first = self.first_live.item(row)
        ids = self.block_table[row, first:count][::-1].copy()
        self.block_table[row, :count] = 0
        self.num_blocks[row] = self.num_cached_blocks[row] = self.first_live[row] = 0
        self.block_pool.free_blocks(ids)

    def row_block_ids(self, row: int) -> np.ndarray:
        """int32[k] copy of the row's blocks, nulls where they were given back."""
        return self.block_table[row, : self.num_blocks.item(row)].copy()

    def row_quiet_until(self, row: int) -> int:
        """Slots up to which a step of the row neither allocates, registers nor gives back in this group."""
        size = self.block_size
        quiet = min(self.num_blocks.item(row) * size, self.tokens_until_release(self.first_live.item(row)))
        if self.settings.enable_caching:
            quiet = min(quiet, (self.num_cached_blocks.item(row) + 1) * size - 1)
        return quiet

    # Many rows. First columns and counts are int64[n], 0 where a row has nothing to do.

    def skipped_columns(self, rows: np.ndarray, settled_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Per row the first column to give back and how many, as `remove_skipped_blocks` would."""
        first = self.first_live[rows]
        skipped = np.minimum(self.count_skipped_tokens(settled_tokens) // self.block_size, self.num_blocks[rows])
        return first, np.maximum(skipped - first, 0)

    def needed_columns(self, rows: np.ndarray, num_slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Per row the first column to append and how many, as `allocate_new_blocks` would."""
        held = self.num_blocks[rows]
        return held, np.maximum(-(-num_slots // self.block_size) - held, 0)

    def unregistered_columns(self, rows: np.ndarray, num_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Per row the first column to register and how many, as `cache_blocks` would."""
        cached = self.num_cached_blocks[rows]
        return cached, np.maximum(num_tokens // self.block_size - cached, 0)

    def detach(self, spans: Spans, entries: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """Puts nulls at the entries of the spans and returns int32[k] the blocks that were there, still held."""
        ids = self.block_table[entries]
        self.block_table[entries] = 0
        self.first_live[spans.rows] += spans.counts
        return ids

    def attach(self, spans: Spans, entries: tuple[np.ndarray, np.ndarray], block_ids: np.ndarray) -> None:
        """Appends int32[k] new blocks at the entries of the spans."""
        self.block_table[entries] = block_ids
        self.num_blocks[spans.rows] += spans.counts

    def register(self, spans: Spans, entries: tuple[np.ndarray, np.ndarray], block_hashes: list[BlockHash]) -> None:
        """Registers the blocks at the entries of the spans under one hash each. Null blocks are passed over."""
        ids = self.block_table[entries]
        if ids.all():
            self.block_pool.register_many(ids, block_hashes, self.kv_cache_group_id)
        else:
            real = np.flatnonzero(ids)
            self.block_pool.register_many(ids[real], [block_hashes[i] for i in real.tolist()], self.kv_cache_group_id)
        self.num_cached_blocks[spans.rows] += spans.counts
        self.note_registered(ids)

    def quiet_until(self, rows: np.ndarray) -> np.ndarray:
        """`row_quiet_until` of int64[n] rows."""
        quiet = np.minimum(self.num_blocks[rows] * self.block_size, self.tokens_until_release(self.first_live[rows]))
        if self.settings.enable_caching:
            quiet = np.minimum(quiet, (self.num_cached_blocks[rows] + 1) * self.block_size - 1)
        return quiet

    # Lookup.

    def cached_run(self, block_hashes: Sequence[BlockHash], group_ids: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        """Per group int32[k] blocks of the longest leading run of hashes that every group has cached."""
        runs = []
        for group_id in group_ids:
            run = self.block_pool.find_run(block_hashes, group_id)
            run = run[: self.fresh_blocks.cut(run)]
            if run.size < len(block_hashes):
                block_hashes = block_hashes[: run.size]
            runs.append(run)
        return tuple(run[: runs[-1].size] for run in runs)

    # Checks.

    def check_invariants(self, owned_rows: Sequence[int]) -> None:
        """Raises InvariantError if G1 to G3 do not hold for this group."""
        group = f"group {self.kv_cache_group_id}"
        columns = np.arange(self.block_table.shape[1])
        held, first = self.num_blocks[:, None], self.first_live[:, None]
        if not ((first >= 0).all() and (first <= held).all() and (held <= columns.size).all()):
            raise InvariantError(f"{group}: expected 0 <= first_live <= num_blocks <= {columns.size} in every row")
        if (self.num_cached_blocks > self.num_blocks).any():
            raise InvariantError(f"{group}: a row has more registered blocks than blocks")
        inside = (columns >= first) & (columns < held)
        if not np.array_equal(self.block_table != 0, inside):
            raise InvariantError(f"{group}: expected null blocks exactly outside [first_live, num_blocks)")
        num_blocks = self.block_pool.num_blocks
        if self.block_table.size and not 0 <= self.block_table.min() <= self.block_table.max() < num_blocks:
            raise InvariantError(f"{group}: a block id is outside its pool of {num_blocks} blocks")
        unowned = np.ones(self.num_blocks.size, bool)
        unowned[list(owned_rows)] = False
        if self.num_blocks[unowned].any() or self.num_cached_blocks[unowned].any():
            raise InvariantError(f"{group}: a row that no request owns holds blocks")
