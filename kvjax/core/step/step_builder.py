"""Builds a StepPlan from the manager's tables and the rows that the scheduler chose.

Flow:    KVCacheManager tables + rows in scheduling order -> [build_step_plan] -> StepPlan
Source:  ARCHITECTURE.md, "The step plan"; request order as tpu-inference emits it (decode, prefill, mixed)

A handful of vector operations whatever the number of requests. Every array of the plan is a copy: the tables may change
while the step is on its way to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from kvjax.core.pool.page_edits import PageCopies
from kvjax.core.spec import KVCacheConfig, KVCacheGroupSpec, StatePages
from kvjax.core.step.mrope_positions import MRopePositions
from kvjax.core.step.step_drafts import StepDrafts
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
        """token_ids int32[rows, cols], num_tokens and num_computed_tokens int64[rows], request_ids object[rows]."""

    def block_tables(self, group_id: int) -> np.ndarray:
        """The group's int32[rows, columns], 0 beyond each row's blocks."""

    def num_blocks(self, group_id: int) -> np.ndarray:
        """Blocks in each row of the group's table."""

    def block_size(self, group_id: int) -> int:
        """Tokens of one of the group's blocks, those on all ranks of context parallelism."""

    def reserved_blocks(self, group_id: int) -> np.ndarray:
        """int32[k] blocks that the group's spec reserves; asked for where it reserves any."""

    def take_page_copies(self) -> tuple[PageCopies, ...]:
        """Per pool the pages that this step copies first."""

    def take_pages_to_zero(self) -> tuple[np.ndarray, ...]:
        """Per pool int32[Z] the pages that it zeroes then."""


class TableShape(Protocol):
    """How large a step's block tables are made: a `Bucket` of the device layer, for example."""

    @property
    def num_requests(self) -> int:
        """Rows, at least the step's requests."""

    @property
    def num_columns(self) -> int:
        """Columns, at least those of the longest row."""


PickShape: TypeAlias = Callable[..., TableShape]  # of tokens, requests, columns and, if there are any, most drafts


def build_step_plan(
    tables: StepTables,
    rows: np.ndarray,  # int64[S] distinct rows in scheduling order
    num_new_tokens: np.ndarray,  # int[S] >= 1; blocks for them are allocated
    *,
    wants_logits: np.ndarray | None = None,  # bool[S]; None: requests that reach their last known token
    last_token_source: np.ndarray | None = None,  # int[S] -1: known, else index into the tokens sampled a step before
    drafts: StepDrafts | None = None,  # among the new tokens, as the last ones of their requests
    new_blocks: Sequence[TableUpdate] | None = None,  # per group, since the last step
    page_copies: Sequence[PageCopies] | None = None,  # per pool; None: taken from `tables`
    pages_to_zero: Sequence[np.ndarray] | None = None,  # per pool; None: taken from `tables`
    writes_encoder: np.ndarray | None = None,  # bool[S] whose encoder runs now; None: of requests with nothing computed
    mrope: MRopePositions | None = None,  # None: positions are places in the sequence
    pick_shape: PickShape | None = None,  # of the block tables: `Buckets.pick`; None: as large as they are
) -> StepPlan:
    """The plan of one step. Call it after the blocks are allocated and before `num_computed_tokens` advances.

    Requests come out as decode (one new token), prefill (empty), mixed, each in scheduling order; `plan.rows` tells.
    With `last_token_source` the last new token of a request, drafts not counted, need not be in the table yet. Drafts
    follow the last token that a request has, and are in no table; the logits of that token and of all drafts are
    wanted, row by row as `StepPlan.logits_starts` tells. With `pick_shape` block tables are made in the shape that the
    device wants, instead of being copied into it later.
    Groups of cross attention have lengths and slots of encoder tokens: the lengths of every request, slots where the
    encoder runs in this step, from `encoder_starts[i]` on those of request i.
    Groups of compressed caches have lengths and slots of states, a slot for each state that the new tokens complete,
    and where layers differ in tokens per state `GroupPlan.compressed` has them for each number.
    Groups of recurrent layers have no slots but the pages of the states to start from and to leave. Under context
    parallelism lengths and slots count those of all ranks (`context_parallel`).

    Raises:
        ValueError: a row repeats or holds no request, a request has no new tokens or more than it has tokens, its
            blocks do not hold them, drafts are not as `StepDrafts` wants them, do not follow a request's last token or
            get no logits, or `pick_shape` finds no shape. No page edits are taken.
    """
    table = tables.request_table
    rows, num_new = np.asarray(rows, np.int64), np.asarray(num_new_tokens, np.int64)
    _check_rows(rows, num_new, len(table.request_ids))
    if drafts is not None:
        drafts.check(rows, num_new)
        drafts = drafts if np.count_nonzero(drafts.counts) else None
    is_longer = num_new != 1
    num_decode = rows.size - int(np.count_nonzero(is_longer))
    order = slice(None) if not is_longer[:num_decode].any() else np.argsort(is_longer, kind="stable")
    rows, num_new = rows[order].copy(), num_new[order]
    computed = np.asarray(table.num_computed_tokens[rows], np.int64)
    seq_lens = computed + num_new
    known = np.asarray(table.num_tokens[rows], np.int64)
    source = None if last_token_source is None else np.asarray(last_token_source)[order]
    drafts = None if drafts is None else drafts.in_order(order)
    own_lens = seq_lens if drafts is None else seq_lens - drafts.counts
    available = known if source is None else known + (source >= 0)
    _check_tokens(rows, own_lens, available)
    wanted = own_lens >= known if wants_logits is None else np.asarray(wants_logits, bool)[order]

    starts = _starts(num_new, is_decode=num_decode == rows.size)
    ends = starts[1:] - 1
    tokens = _Tokens.of(rows, computed, num_new, starts)
    token_source = np.full(tokens.rows.size, -1, np.int32)
    if source is None and drafts is None:
        token_ids = table.token_ids[tokens.rows, tokens.positions]
    else:
        token_ids = table.token_ids[tokens.rows, np.minimum(tokens.positions, table.token_ids.shape[1] - 1)]
    if source is not None:
        token_source[ends if drafts is None else ends - drafts.counts] = source
        token_ids[token_source >= 0] = 0
    if drafts is None:
        num_wanted = np.count_nonzero(wanted)
        logits_indices = (ends if num_wanted == rows.size else ends[wanted]).astype(np.int32)
        logits_starts = np.arange(num_wanted + 1, dtype=np.int32)
    else:
        _check_drafts(rows, drafts.counts, own_lens == available, wanted)
        drafts.put(ends, token_ids, token_source)
        logits_indices, logits_starts = drafts.logits_rows(ends, wanted)
        if pick_shape is not None:
            pick_shape = partial(pick_shape, num_drafts=int(drafts.counts.max()))
    writes = None if writes_encoder is None else np.asarray(writes_encoder, bool)[order]
    updates = [NO_UPDATE] * len(tables.kv_cache_config.kv_cache_groups) if new_blocks is None else new_blocks
    positions = None if mrope is None else mrope.of_tokens(rows, computed, starts, *tokens)
    request_ids = _request_ids(table.request_ids, rows)
    encoder = _Encoder(table, rows, computed, writes)
    num_drafts = None if drafts is None else drafts.counts
    step = _Step(rows, computed, seq_lens, seq_lens.astype(np.int32), tokens, encoder, num_drafts)
    groups = _group_plans(tables, step, updates, pick_shape)  # the last check: now edits may be taken
    return StepPlan(
        request_ids=request_ids,
        rows=rows,
        num_new_tokens=num_new.astype(np.int32),
        num_computed_tokens=computed.astype(np.int32),
        token_ids=token_ids.astype(np.int32, copy=False),
        positions=tokens.positions.astype(np.int32) if positions is None else positions,
        query_start_loc=starts.astype(np.int32),
        logits_indices=logits_indices,
        logits_starts=logits_starts,
        distribution=np.array([num_decode, num_decode, rows.size], np.int32),
        token_source=token_source,
        page_copies=tables.take_page_copies() if page_copies is None else tuple(page_copies),
        pages_to_zero=tables.take_pages_to_zero() if pages_to_zero is None else tuple(pages_to_zero),
        groups=groups,
    )


def logits_requests(plan: StepPlan) -> np.ndarray:  # int64[N]
    """Which request of the plan each row of logits belongs to, as indices into `plan.request_ids`."""
    return np.searchsorted(plan.query_start_loc, plan.logits_indices, side="right") - 1


_Places: TypeAlias = tuple[np.ndarray, np.ndarray]  # int64[T] table columns, int32[T] offsets in the blocks


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

    def places(self, block_size: int) -> _Places:
        """Of every token."""
        columns = self.positions // block_size
        return columns, (self.positions - columns * block_size).astype(np.int32)


def _starts(counts: np.ndarray, *, is_decode: bool = False) -> np.ndarray:  # int64[n + 1]
    """Where each of int64[n] counts begins, and where the last ends; `is_decode`: all are 1."""
    if is_decode:
        return np.arange(counts.size + 1)
    starts = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


class _Encoder(NamedTuple):
    """Where the encoder tokens of the step's requests are told; asked for groups of cross attention only."""

    table: Any  # with num_encoder_tokens int64[rows]
    rows: np.ndarray  # int64[S]
    computed: np.ndarray  # int64[S]
    writes: np.ndarray | None  # bool[S] whose are written in this step; None: of requests with nothing computed

    @property
    def lengths(self) -> np.ndarray:  # int64[S]
        return np.asarray(self.table.num_encoder_tokens[self.rows], np.int64)

    @property
    def starts(self) -> np.ndarray:  # int64[S + 1]
        """Where those of each request begin that are written, one request after another."""
        writes = self.computed == 0 if self.writes is None else self.writes
        return _starts(np.where(writes, self.lengths, 0))

    def tokens(self, starts: np.ndarray) -> _Tokens:
        """Those that are written."""
        counts = np.diff(starts)
        return _Tokens(np.repeat(self.rows, counts), np.arange(starts[-1]) - np.repeat(starts[:-1], counts))


class _Step(NamedTuple):
    """What the groups' plans are made from."""

    rows: np.ndarray  # int64[S]
    computed: np.ndarray  # int64[S] tokens before the step
    seq_lens: np.ndarray  # int64[S] tokens after it
    plan_lens: np.ndarray  # int32[S] the same, for the plans
    tokens: _Tokens
    encoder: _Encoder
    num_drafts: np.ndarray | None  # int[S] of the new tokens; None: there are none


class _Held(NamedTuple):
    """The block table of one group, and how much of it the step's requests hold."""

    group_id: int
    block_size: int
    table: np.ndarray  # int32[rows, columns], live
    counts: np.ndarray  # int64[rows] blocks in each row of it, live
    num_blocks: np.ndarray  # int64[S] those of the step's requests
    num_columns: int  # the most of them
    is_like_the_last: bool = False  # as many blocks of the same size as in the group before


def _held_blocks(tables: StepTables, num_groups: int, rows: np.ndarray) -> list[_Held]:
    """Per group; groups of one manager share their counts, which are then looked at once."""
    held: list[_Held] = []
    for group_id in range(num_groups):
        counts, size, table = tables.num_blocks(group_id), tables.block_size(group_id), tables.block_tables(group_id)
        before = held[-1] if held else None
        if before is not None and before.counts is counts and before.block_size == size:
            held.append(before._replace(group_id=group_id, table=table, is_like_the_last=True))
        else:
            num_blocks = counts[rows]
            held.append(_Held(group_id, size, table, counts, num_blocks, int(num_blocks.max(initial=0))))
    return held


def _group_plans(
    tables: StepTables, step: _Step, updates: Sequence[TableUpdate], pick_shape: PickShape | None
) -> tuple[GroupPlan, ...]:
    """Every group's part; what depends on the block size alone is computed once for each."""
    groups = tables.kv_cache_config.kv_cache_groups
    held = _held_blocks(tables, len(groups), step.rows)
    shape = None if pick_shape is None else _picked(pick_shape, step, max(1, *(own.num_columns for own in held)))
    places = {size: step.tokens.places(size) for size in {own.block_size for own in held}}
    plans = []
    for group, own, update in zip(groups, held, updates, strict=True):
        block_tables, padded = _copied_tables(own, step.rows, shape)
        plans.append(
            GroupPlan(
                pool_id=group.pool_id,
                kind=group.kv_cache_spec.kind,
                block_tables=block_tables,
                padded_tables=padded,
                new_blocks=update,
                reserved_blocks=tables.reserved_blocks(own.group_id)
                if group.kv_cache_spec.num_reserved_blocks
                else None,
                **_lengths_and_places(group, own, step, places[own.block_size]),
            )
        )
    return tuple(plans)


def _lengths_and_places(group: KVCacheGroupSpec, own: _Held, step: _Step, places: _Places) -> dict[str, Any]:
    """The fields of a group's plan that say how long its requests are, and where this step reads and writes."""
    spec = group.kv_cache_spec
    if spec.state_pages is not None:
        return _state_fields(spec.state_pages, own, step)
    if spec.reads_encoder:
        lengths, starts = step.encoder.lengths, step.encoder.starts
        tokens = step.encoder.tokens(starts)
        _check_blocks(step.rows, own, lengths)
        slots = _slots(own.table, own.block_size, tokens.rows, tokens.places(own.block_size))
        return {
            "seq_lens": lengths.astype(np.int32),
            "slot_mapping": slots,
            "encoder_starts": starts.astype(np.int32),
        }
    if not own.is_like_the_last:
        _check_blocks(step.rows, own, step.seq_lens)
    if group.tokens_per_state != {1}:
        return _compressed_fields(group.tokens_per_state, own, step)
    return {
        "seq_lens": step.plan_lens,
        "slot_mapping": _slots(own.table, own.block_size, step.tokens.rows, places),
    }


def _picked(pick_shape: PickShape, step: _Step, num_columns: int) -> TableShape:
    num_requests = step.rows.size
    shape = pick_shape(step.tokens.rows.size, num_requests, num_columns)
    if shape.num_requests < num_requests or shape.num_columns < num_columns:
        raise ValueError(
            f"expected a shape of at least {num_requests} requests and {num_columns} columns, got "
            f"{shape.num_requests} and {shape.num_columns}"
        )
    return shape


def _copied_tables(own: _Held, rows: np.ndarray, shape: TableShape | None) -> tuple[np.ndarray, np.ndarray | None]:
    """The requests' rows of a block table, and the array of `shape` that they are the start of."""
    if shape is None:
        return own.table[rows, : own.num_columns], None
    wanted = (shape.num_requests, shape.num_columns)
    if rows.size == wanted[0] and own.table.shape[1] >= wanted[1]:
        padded = own.table[rows, : wanted[1]]
    elif rows.size and own.table.shape[1] >= wanted[1]:
        index = np.full(wanted[0], rows[0])
        index[: rows.size] = rows
        padded = own.table[index, : wanted[1]]
        padded[rows.size :] = 0
    else:
        padded = np.zeros(wanted, np.int32)
        padded[: rows.size, : own.num_columns] = own.table[rows, : own.num_columns]
    padded.flags.writeable = False
    return padded[: rows.size, : own.num_columns], padded


def _slots(table: np.ndarray, block_size: int, rows: np.ndarray, places: _Places) -> np.ndarray:  # int32[T]
    """Where the states of int64[T] rows at these places are written; -1 in null blocks."""
    columns, offsets = places
    slots = table[rows, columns]
    is_null = None if np.count_nonzero(slots) == slots.size else slots == 0
    slots *= block_size
    slots += offsets
    if is_null is not None:
        slots[is_null] = -1
    return slots


def _compressed_fields(ratios: frozenset[int], own: _Held, step: _Step) -> dict[str, Any]:
    """Of a group with states of several tokens: lengths and slots of them, for each number of tokens."""
    compressed = []
    for ratio in sorted(ratios):
        states, size = step.tokens.states(ratio), own.block_size // ratio
        slots = _slots(own.table, size, states.rows, states.places(size))
        compressed.append(CompressedStates(ratio, (step.seq_lens // ratio).astype(np.int32), slots))
    if len(compressed) == 1:
        (only,) = compressed
        return {"seq_lens": only.seq_lens, "slot_mapping": only.slot_mapping, "compressed": (only,)}
    slots = _slots(own.table, own.block_size, step.tokens.rows, step.tokens.places(own.block_size))
    return {"seq_lens": step.plan_lens, "slot_mapping": slots, "compressed": tuple(compressed)}


def _state_fields(pages: StatePages, own: _Held, step: _Step) -> dict[str, Any]:
    """Of a group of recurrent layers: the state to start from and where to leave it; tokens have no slots."""
    short = pages.most_tokens(own.num_blocks) < step.seq_lens
    if short.any():
        i = int(short.argmax())
        raise ValueError(
            f"row {step.rows[i]}, group {own.group_id}: expected the blocks of a state after {step.seq_lens[i]} "
            f"tokens, got {own.num_blocks[i]} blocks; allocate them before the step is built"
        )
    write = pages.pages_of_states(own.table, own.counts, step.rows, step.seq_lens)
    if step.num_drafts is not None and step.num_drafts.max() > pages.num_drafts:
        i = int(step.num_drafts.argmax())
        raise ValueError(
            f"row {step.rows[i]}, group {own.group_id}: expected at most {pages.num_drafts} drafts, as there are "
            f"states for, got {step.num_drafts[i]}"
        )
    if pages.num_drafts:
        before = pages.pages_of_drafts(own.table, own.counts, step.rows, step.seq_lens)
        write = _with_drafts(write, before, step.seq_lens - step.computed, step.num_drafts)
    has_initial = step.computed > 0
    read = np.where(has_initial, pages.pages_of_states(own.table, own.counts, step.rows, step.computed), 0)
    return {
        "seq_lens": step.plan_lens,
        "slot_mapping": np.full(step.tokens.rows.size, -1, np.int32),
        "state_read": read.astype(np.int32),
        "state_write": write.astype(np.int32),
        "has_initial_state": has_initial,
    }


def _with_drafts(
    write: np.ndarray, before: np.ndarray, num_new: np.ndarray, num_drafts: np.ndarray | None
) -> np.ndarray:  # int32[S, 1 + s]
    """Pages of states after the last of int64[S] new tokens; of more than 1 + s after the last one and drafts only."""
    pages = np.concatenate([before, write[:, None]], axis=1)
    most = pages.shape[1]
    num_kept = np.where(num_new > most, 1 if num_drafts is None else 1 + num_drafts, num_new)
    pages[np.arange(most) < most - num_kept[:, None]] = 0
    return pages


def _request_ids(ids: np.ndarray, rows: np.ndarray) -> tuple[str, ...]:
    """Ids of the requests in `rows`."""
    found = ids[rows].tolist()
    if not all(found):  # an id may be empty
        empty = [row for row, request_id in zip(rows.tolist(), found, strict=True) if request_id is None]
        if empty:
            raise ValueError(f"rows {empty} hold no request")
    return tuple(found)


def _check_rows(rows: np.ndarray, num_new: np.ndarray, num_rows: int) -> None:
    if rows.shape != num_new.shape or rows.ndim != 1:
        raise ValueError(f"expected as many rows as numbers of tokens, got {rows.shape} and {num_new.shape}")
    if rows.size and (rows.min() < 0 or rows.max() >= num_rows):
        raise ValueError(f"expected rows in [0, {num_rows}), got {rows.min()} to {rows.max()}")
    if np.bincount(rows, minlength=1).max() > 1:
        raise ValueError(f"expected distinct rows, got {rows.tolist()}")
    if rows.size and num_new.min() < 1:
        raise ValueError(f"row {rows[num_new.argmin()]}: expected at least 1 new token, got {num_new.min()}")


def _check_blocks(rows: np.ndarray, own: _Held, seq_lens: np.ndarray) -> None:
    short = own.num_blocks * own.block_size < seq_lens
    if short.any():
        i = int(short.argmax())
        raise ValueError(
            f"row {rows[i]}, group {own.group_id}: expected blocks for {seq_lens[i]} tokens, got {own.num_blocks[i]} "
            f"blocks of {own.block_size}; allocate them before the step is built"
        )


def _check_tokens(rows: np.ndarray, seq_lens: np.ndarray, available: np.ndarray) -> None:
    over = seq_lens > available
    if over.any():
        i = int(over.argmax())
        raise ValueError(
            f"row {rows[i]}: a step up to token {seq_lens[i]} needs tokens, the request has {available[i]}"
        )


def _check_drafts(rows: np.ndarray, counts: np.ndarray, follow_last: np.ndarray, wanted: np.ndarray) -> None:
    bad = (counts > 0) & ~(follow_last & wanted)
    if bad.any():
        i = int(bad.argmax())
        reason = "logits that verify them" if follow_last[i] else "the request's last token before them"
        raise ValueError(f"row {rows[i]}: {counts[i]} drafts need {reason}")


__all__ = ["NO_UPDATE", "StepTables", "build_step_plan", "logits_requests"]
