"""Builds a StepPlan from the manager's tables and the rows that the scheduler chose.

Flow:    KVCacheManager tables + rows in scheduling order -> [build_step_plan] -> StepPlan
Source:  ARCHITECTURE.md, "The step plan"; request order as tpu-inference emits it (decode, prefill, mixed)

A handful of vector operations whatever the number of requests. Every array of the plan is a copy: the tables may change
while the step is on its way to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvjax.core.pool.page_edits import PageCopies
from kvjax.core.step.group_plans import (
    BlockTables,
    EncoderTokens,
    GroupsStep,
    PickShape,
    StepTokens,
    group_plans,
    starts_of,
)
from kvjax.core.step.idle_states import idle_state_moves
from kvjax.core.step.mrope_positions import MRopePositions
from kvjax.core.step.step_drafts import StepDrafts
from kvjax.core.step.step_plan import StepPlan, TableUpdate

_NO_IDS = np.zeros(0, np.int32)
_NO_IDS.flags.writeable = False
NO_UPDATE = TableUpdate(_NO_IDS.astype(np.int64), _NO_IDS.astype(np.int64), _NO_IDS)


class StepTables(BlockTables, Protocol):
    """What a plan is read from: `KVCacheManager`, or anything with its tables."""

    @property
    def request_table(self) -> Any:
        """token_ids int32[rows, cols], int64[rows] num_tokens, num_computed_tokens and num_prompt_tokens (of R-SWA),
        and request_ids object[rows].
        """

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
            blocks do not hold them, it starts where no idle state can be, drafts are not as `StepDrafts` wants them, do
            not follow a request's last token or get no logits, or `pick_shape` finds no shape. No page edits are taken.
    """
    table = tables.request_table
    rows, num_new = np.asarray(rows, np.int64), np.asarray(num_new_tokens, np.int64)
    _check_rows(rows, num_new, len(table.request_ids))
    if drafts is not None:
        drafts.check_drafts(rows, num_new)
        drafts = drafts if np.count_nonzero(drafts.counts) else None
    one_each = _one_each(rows.size) if np.maximum.reduce(num_new, initial=1) == 1 else None
    order = slice(None) if one_each is not None else decode_first(num_new)
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

    starts = starts_of(num_new) if one_each is None else one_each.starts
    ends = starts[1:] - 1 if one_each is None else starts[:-1]
    tokens = StepTokens.of(rows, computed, num_new, starts)
    if source is None and drafts is None:
        token_ids = table.token_ids[tokens.rows, tokens.positions]
    else:
        token_ids = table.token_ids[tokens.rows, np.minimum(tokens.positions, table.token_ids.shape[1] - 1)]
    if one_each is not None and source is None:
        token_source = one_each.no_source
    else:
        token_source = np.full(tokens.rows.size, -1, np.int32)
    if source is not None:
        token_source[ends if drafts is None else ends - drafts.counts] = source
        token_ids[token_source >= 0] = 0
    if drafts is None:
        num_wanted = np.count_nonzero(wanted)
        if one_each is not None and num_wanted == rows.size:
            logits_starts, logits_indices = one_each.starts32, one_each.starts32[:-1]
        else:
            logits_indices = (ends if num_wanted == rows.size else ends[wanted]).astype(np.int32)
            logits_starts = np.arange(num_wanted + 1, dtype=np.int32)
    else:
        _check_drafts(rows, drafts.counts, own_lens == available, wanted)
        drafts.put(ends, token_ids, token_source)
        logits_indices, logits_starts = drafts.logits_rows(ends, wanted)
        if pick_shape is not None:
            pick_shape = partial(pick_shape, num_drafts=int(drafts.counts.max()), longest=int(num_new.max()))
    writes = None if writes_encoder is None else np.asarray(writes_encoder, bool)[order]
    updates = [NO_UPDATE] * len(tables.kv_cache_config.kv_cache_groups)
    if new_blocks is not None:
        updates = [TableUpdate(*map(np.array, (one.rows, one.columns, one.block_ids))) for one in new_blocks]
    num_computed = computed.astype(np.int32)
    if mrope is not None:
        positions = mrope.of_tokens(rows, computed, starts, *tokens)
    else:
        positions = num_computed if tokens.positions is computed else tokens.positions.astype(np.int32)
    request_ids = _request_ids(table.request_ids, rows)
    encoder = EncoderTokens(table, rows, computed, writes)
    num_drafts = None if drafts is None else drafts.counts
    step = GroupsStep(rows, computed, seq_lens, seq_lens.astype(np.int32), tokens, encoder, num_drafts)
    # The last checks: now edits may be taken.
    groups = group_plans(tables, step, updates, pick_shape)
    idle_states = idle_state_moves(tables.kv_cache_config, groups, step, table)
    return StepPlan(
        request_ids=request_ids,
        rows=rows,
        num_new_tokens=num_new.astype(np.int32) if one_each is None else one_each.num_new,
        num_computed_tokens=num_computed,
        token_ids=token_ids.astype(np.int32, copy=False),
        positions=positions,
        query_start_loc=starts.astype(np.int32) if one_each is None else one_each.starts32,
        logits_indices=logits_indices,
        logits_starts=logits_starts,
        distribution=_distribution(num_new) if one_each is None else one_each.distribution,
        token_source=token_source,
        page_copies=tables.take_page_copies()
        if page_copies is None
        else tuple([PageCopies(np.array(one.sources), np.array(one.destinations)) for one in page_copies]),
        pages_to_zero=tables.take_pages_to_zero() if pages_to_zero is None else tuple(map(np.array, pages_to_zero)),
        groups=groups,
        idle_states=idle_states,
    )


def logits_requests(plan: StepPlan) -> np.ndarray:  # int64[N]
    """Which request of the plan each row of logits belongs to, as indices into `plan.request_ids`."""
    return np.searchsorted(plan.query_start_loc, plan.logits_indices, side="right") - 1


class _OneEach(NamedTuple):
    """What steps of one token for each of S requests have in common. Read-only."""

    starts: np.ndarray  # int64[S + 1] where the token of each begins, and the last one ends
    starts32: np.ndarray  # int32[S + 1]
    num_new: np.ndarray  # int32[S]
    no_source: np.ndarray  # int32[S] where the host knows all tokens
    distribution: np.ndarray  # int32[3]


@lru_cache(maxsize=64)
def _one_each(num_requests: int) -> _OneEach:
    starts = np.arange(num_requests + 1)
    columns = _OneEach(
        starts,
        starts.astype(np.int32),
        np.ones(num_requests, np.int32),
        np.full(num_requests, -1, np.int32),
        np.full(3, num_requests, np.int32),
    )
    for column in columns:
        column.flags.writeable = False
    return columns


def decode_first(num_new: np.ndarray) -> np.ndarray | slice:  # int64[S] each
    """The order of a step's requests that begins with those of one new token; a whole slice: they stand so."""
    is_longer = num_new != 1
    num_decode = num_new.size - np.count_nonzero(is_longer)
    return np.argsort(is_longer, kind="stable") if is_longer[:num_decode].any() else slice(None)


def _distribution(num_new: np.ndarray) -> np.ndarray:  # int32[3]
    """Ends of the parts of int64[S] numbers of new tokens that stand in order."""
    num_decode = np.count_nonzero(num_new == 1)
    return np.array([num_decode, num_decode, num_new.size], np.int32)


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
    if not rows.size:
        return
    if np.maximum.reduce(rows.view(np.uint64)) >= num_rows:  # a negative row is a huge one
        raise ValueError(f"expected rows in [0, {num_rows}), got {rows.min()} to {rows.max()}")
    if np.maximum.reduce(np.bincount(rows)) > 1:
        raise ValueError(f"expected distinct rows, got {rows.tolist()}")
    if np.minimum.reduce(num_new) < 1:
        raise ValueError(f"row {rows[num_new.argmin()]}: expected at least 1 new token, got {num_new.min()}")


def _check_tokens(rows: np.ndarray, seq_lens: np.ndarray, available: np.ndarray) -> None:
    over = seq_lens > available
    if np.count_nonzero(over):
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


__all__ = ["NO_UPDATE", "PickShape", "StepTables", "build_step_plan", "decode_first", "logits_requests"]
