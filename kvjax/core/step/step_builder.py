"""Builds a StepPlan from the manager's tables and the rows that the scheduler chose.

Flow:    KVCacheManager tables + rows in scheduling order -> [build_step_plan] -> StepPlan
Source:  ARCHITECTURE.md, "The step plan"; request order as tpu-inference emits it (decode, prefill, mixed)

A handful of vector operations whatever the number of requests, request ids apart. Every array of the plan is a copy:
the tables may change while the step is on its way to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvjax.core.kinds.cross_attention import CrossAttentionSpec
from kvjax.core.kinds.mamba import MambaSpec
from kvjax.core.kinds.mla import tokens_per_state_of
from kvjax.core.pool.page_edits import PageCopies
from kvjax.core.spec import KVCacheConfig
from kvjax.core.step.step_plan import CompressedStates, GroupPlan, StepPlan, TableUpdate

_NO_IDS = np.zeros(0, np.int32)
_NO_IDS.flags.writeable = False
NO_UPDATE = TableUpdate(_NO_IDS.astype(np.int64), _NO_IDS.astype(np.int64), _NO_IDS)


class StepTables(Protocol):
    """What a plan is read from: `KVCacheManager`, or anything with its tables."""

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """Groups, in the order of block tables."""

    @property
    def request_table(self) -> Any:
        """token_ids int32[rows, cols], num_tokens and num_computed_tokens int64[rows], requests by row."""

    def block_tables(self, group_id: int) -> np.ndarray:
        """The group's int32[rows, columns], 0 beyond each row's blocks."""

    def num_blocks(self, group_id: int) -> np.ndarray:
        """Blocks in each row of the group's table."""

    def block_size(self, group_id: int) -> int:
        """Tokens of one of the group's blocks, those on all ranks of context parallelism."""

    def take_page_copies(self) -> tuple[PageCopies, ...]:
        """Per pool the pages that this step copies first."""

    def take_pages_to_zero(self) -> tuple[np.ndarray, ...]:
        """Per pool int32[Z] the pages that it zeroes then."""


def build_step_plan(
    tables: StepTables,
    rows: np.ndarray,  # int64[S] distinct rows in scheduling order
    num_new_tokens: np.ndarray,  # int[S] >= 1; blocks for them are allocated
    *,
    wants_logits: np.ndarray | None = None,  # bool[S]; None: requests that reach their last known token
    last_token_source: np.ndarray | None = None,  # int[S] -1: known, else index into the tokens sampled a step before
    new_blocks: Sequence[TableUpdate] | None = None,  # per group, since the last step
    page_copies: Sequence[PageCopies] | None = None,  # per pool; None: taken from `tables`
    pages_to_zero: Sequence[np.ndarray] | None = None,  # per pool; None: taken from `tables`
    writes_encoder: np.ndarray | None = None,  # bool[S] whose encoder runs now; None: of requests with nothing computed
) -> StepPlan:
    """The plan of one step. Call it after the blocks are allocated and before `num_computed_tokens` advances.

    Requests come out as decode (one new token), prefill (empty), mixed, each in scheduling order; `plan.rows` tells.
    With `last_token_source` the last new token of a request need not be in the table yet. Groups of cross attention
    have lengths and slots of encoder tokens: the lengths of every request, slots where the encoder runs in this step.
    Groups of compressed caches have lengths and slots of states, a slot for each state that the new tokens complete,
    and where layers differ in tokens per state `GroupPlan.compressed` has them for each number.
    Groups of recurrent layers have no slots but the pages of the states to start from and to leave. Under context
    parallelism lengths and slots count those of all ranks (`context_parallel`).

    Raises:
        ValueError: a row repeats or holds no request, a request has no new tokens or more than it has tokens, or its
            blocks do not hold them.
    """
    table = tables.request_table
    rows, num_new = np.asarray(rows, np.int64), np.asarray(num_new_tokens, np.int64)
    _check_rows(rows, num_new, len(table.requests))
    order = np.argsort(num_new != 1, kind="stable")
    rows, num_new = rows[order], num_new[order]
    computed = np.asarray(table.num_computed_tokens[rows], np.int64)
    seq_lens = computed + num_new
    source = np.full(rows.size, -1, np.int64) if last_token_source is None else np.asarray(last_token_source)[order]
    known = np.asarray(table.num_tokens[rows], np.int64)
    _check_tokens(rows, seq_lens, known + (source >= 0))

    starts = np.zeros(rows.size + 1, np.int64)
    np.cumsum(num_new, out=starts[1:])
    tokens = _Tokens.of(rows, computed, num_new, starts)
    token_ids = table.token_ids[tokens.rows, np.minimum(tokens.positions, table.token_ids.shape[1] - 1)]
    token_source = np.full(tokens.rows.size, -1, np.int32)
    if last_token_source is not None:
        token_source[starts[1:] - 1] = source
        token_ids[token_source >= 0] = 0
    wanted = seq_lens >= known if wants_logits is None else np.asarray(wants_logits, bool)[order]
    writes = computed == 0 if writes_encoder is None else np.asarray(writes_encoder, bool)[order]
    encoder = _Encoder(table, rows, writes)
    num_decode = int(np.count_nonzero(num_new == 1))
    config = tables.kv_cache_config
    updates = [NO_UPDATE] * len(config.kv_cache_groups) if new_blocks is None else new_blocks
    request_ids = _request_ids(table.requests, rows)
    groups = _group_plans(tables, rows, seq_lens, tokens, updates, encoder)  # the last check: now edits may be taken
    return StepPlan(
        request_ids=request_ids,
        rows=rows,
        num_new_tokens=num_new.astype(np.int32),
        num_computed_tokens=computed.astype(np.int32),
        token_ids=token_ids.astype(np.int32, copy=False),
        positions=tokens.positions.astype(np.int32),
        query_start_loc=starts.astype(np.int32),
        logits_indices=(starts[1:] - 1)[wanted].astype(np.int32),
        distribution=np.array([num_decode, num_decode, rows.size], np.int32),
        token_source=token_source,
        page_copies=tables.take_page_copies() if page_copies is None else tuple(page_copies),
        pages_to_zero=tables.take_pages_to_zero() if pages_to_zero is None else tuple(pages_to_zero),
        groups=groups,
    )


def logits_requests(plan: StepPlan) -> np.ndarray:  # int64[N]
    """Which request of the plan each row of logits belongs to, as indices into `plan.request_ids`."""
    return np.searchsorted(plan.query_start_loc, plan.logits_indices, side="right") - 1


class _Tokens(NamedTuple):
    """The new tokens of all requests, one after another."""

    rows: np.ndarray  # int64[T] row of the request table
    positions: np.ndarray  # int64[T]

    @classmethod
    def of(cls, rows: np.ndarray, computed: np.ndarray, num_new: np.ndarray, starts: np.ndarray) -> _Tokens:
        if rows.size == starts[-1]:  # one token each: nothing to repeat
            return cls(rows, computed)
        positions = np.arange(starts[-1]) + np.repeat(computed - starts[:-1], num_new)
        return cls(np.repeat(rows, num_new), positions)

    def states(self, tokens_per_state: int) -> _Tokens:
        """The compressed states that these tokens complete, in place of tokens."""
        completes = (self.positions + 1) % tokens_per_state == 0
        return _Tokens(self.rows[completes], self.positions[completes] // tokens_per_state)

    def places(self, block_size: int) -> tuple[np.ndarray, np.ndarray]:
        """(table column, offset in the block) of every token, int64[T] each."""
        columns = self.positions // block_size
        return columns, self.positions - columns * block_size


class _Encoder(NamedTuple):
    """Where the encoder tokens of the step's requests are told; asked for groups of cross attention only."""

    table: Any  # with num_encoder_tokens int64[rows]
    rows: np.ndarray  # int64[S]
    writes: np.ndarray  # bool[S] whose are written in this step

    @property
    def lengths(self) -> np.ndarray:  # int64[S]
        return np.asarray(self.table.num_encoder_tokens[self.rows], np.int64)

    @property
    def tokens(self) -> _Tokens:
        """Those that are written, one request after another."""
        counts = np.where(self.writes, self.lengths, 0)
        starts = np.zeros(self.rows.size + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        return _Tokens(np.repeat(self.rows, counts), np.arange(starts[-1]) - np.repeat(starts[:-1], counts))


def _group_plans(
    tables: StepTables,
    rows: np.ndarray,
    seq_lens: np.ndarray,
    tokens: _Tokens,
    updates: Sequence[TableUpdate],
    encoder: _Encoder,
) -> tuple[GroupPlan, ...]:
    """Every group's part; what depends on the block size alone is computed once for each."""
    groups = tables.kv_cache_config.kv_cache_groups
    sizes = [tables.block_size(group_id) for group_id in range(len(groups))]
    places = {size: tokens.places(size) for size in set(sizes)}
    plans = []
    for group_id, (group, update) in enumerate(zip(groups, updates, strict=True)):
        if isinstance(group.kv_cache_spec, MambaSpec):
            plans.append(_state_plan(tables, group_id, rows, seq_lens, tokens, update))
            continue
        block_size = sizes[group_id]
        num_blocks = tables.num_blocks(group_id)[rows]
        table = tables.block_tables(group_id)
        written, lengths, (columns, offsets) = tokens, seq_lens, places[block_size]
        if isinstance(group.kv_cache_spec, CrossAttentionSpec):
            written, lengths = encoder.tokens, encoder.lengths
            columns, offsets = written.places(block_size)
        _check_blocks(rows, group_id, num_blocks, block_size, lengths)
        block_ids = table[written.rows, columns]
        plan = GroupPlan(
            pool_id=group.pool_id,
            kind=group.kv_cache_spec.kind,
            block_tables=table[rows, : int(num_blocks.max(initial=0))],
            new_blocks=update,
            seq_lens=lengths.astype(np.int32),
            slot_mapping=np.where(block_ids > 0, block_ids * block_size + offsets, -1).astype(np.int32),
        )
        ratios = tokens_per_state_of(group)
        plans.append(plan if ratios == {1} else _compressed(plan, ratios, block_size, table, tokens, seq_lens))
    return tuple(plans)


def _compressed(
    plan: GroupPlan, ratios: set[int], block_size: int, table: np.ndarray, tokens: _Tokens, seq_lens: np.ndarray
) -> GroupPlan:
    """The plan of a group with states of several tokens: lengths and slots of them, for each number of tokens."""
    compressed = []
    for ratio in sorted(ratios):
        states, size = tokens.states(ratio), block_size // ratio
        columns, offsets = states.places(size)
        block_ids = table[states.rows, columns]
        slots = np.where(block_ids > 0, block_ids * size + offsets, -1)
        compressed.append(CompressedStates(ratio, (seq_lens // ratio).astype(np.int32), slots.astype(np.int32)))
    if len(compressed) == 1:
        return replace(plan, seq_lens=compressed[0].seq_lens, slot_mapping=compressed[0].slot_mapping)
    return replace(plan, compressed=tuple(compressed))


def _state_plan(
    tables: StepTables, group_id: int, rows: np.ndarray, seq_lens: np.ndarray, tokens: _Tokens, update: TableUpdate
) -> GroupPlan:
    """The part of a group of recurrent layers: the state to start from and where to leave it; tokens have no slots."""
    group = tables.kv_cache_config.kv_cache_groups[group_id]
    spec = group.kv_cache_spec
    assert isinstance(spec, MambaSpec)
    table, num_blocks = tables.block_tables(group_id), tables.num_blocks(group_id)
    short = spec.most_tokens(num_blocks[rows]) < seq_lens
    if short.any():
        i = int(short.argmax())
        raise ValueError(
            f"row {rows[i]}, group {group_id}: expected the blocks of a state after {seq_lens[i]} tokens, got "
            f"{num_blocks[rows[i]]} blocks; allocate them before the step is built"
        )
    computed = tables.request_table.num_computed_tokens[rows]
    write = spec.pages_of_states(table, num_blocks, rows, seq_lens)
    read = np.where(computed > 0, spec.pages_of_states(table, num_blocks, rows, computed), 0)
    return GroupPlan(
        pool_id=group.pool_id,
        kind=spec.kind,
        block_tables=table[rows, : int(num_blocks[rows].max(initial=0))],
        new_blocks=update,
        seq_lens=seq_lens.astype(np.int32),
        slot_mapping=np.full(tokens.rows.size, -1, np.int32),
        state_read=read.astype(np.int32),
        state_write=write.astype(np.int32),
        has_initial_state=computed > 0,
    )


def _request_ids(requests: Sequence[Any], rows: np.ndarray) -> tuple[str, ...]:
    """Ids of the requests in `rows`."""
    try:
        return tuple([requests[row].request_id for row in rows.tolist()])
    except AttributeError:
        empty = [row for row in rows.tolist() if requests[row] is None]
        raise ValueError(f"rows {empty} hold no request") from None


def _check_rows(rows: np.ndarray, num_new: np.ndarray, num_rows: int) -> None:
    if rows.shape != num_new.shape or rows.ndim != 1:
        raise ValueError(f"expected as many rows as numbers of tokens, got {rows.shape} and {num_new.shape}")
    if rows.size and (rows.min() < 0 or rows.max() >= num_rows):
        raise ValueError(f"expected rows in [0, {num_rows}), got {rows.min()} to {rows.max()}")
    if np.bincount(rows, minlength=1).max() > 1:
        raise ValueError(f"expected distinct rows, got {rows.tolist()}")
    if rows.size and num_new.min() < 1:
        raise ValueError(f"row {rows[num_new.argmin()]}: expected at least 1 new token, got {num_new.min()}")


def _check_blocks(
    rows: np.ndarray, group_id: int, num_blocks: np.ndarray, block_size: int, seq_lens: np.ndarray
) -> None:
    short = num_blocks * block_size < seq_lens
    if short.any():
        i = int(short.argmax())
        raise ValueError(
            f"row {rows[i]}, group {group_id}: expected blocks for {seq_lens[i]} tokens, got {num_blocks[i]} blocks of "
            f"{block_size}; allocate them before the step is built"
        )


def _check_tokens(rows: np.ndarray, seq_lens: np.ndarray, available: np.ndarray) -> None:
    over = seq_lens > available
    if over.any():
        i = int(over.argmax())
        raise ValueError(
            f"row {rows[i]}: a step up to token {seq_lens[i]} needs tokens, the request has {available[i]}"
        )


__all__ = ["NO_UPDATE", "StepTables", "build_step_plan", "logits_requests"]
