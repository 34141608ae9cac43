"""Builds a StepPlan from the manager's tables and the rows that the scheduler chose.

Flow:    KVCacheManager tables + rows in scheduling order -> [build_step_plan] -> StepPlan
Source:  DESIGN, "Device layer"; request order as tpu-inference emits it (decode, prefill, mixed)

A handful of vector operations whatever the number of requests. Every array of the plan is a copy: the tables may
change while the step is on its way to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import Any, Protocol

import numpy as np

from kvjax.core.spec import KVCacheConfig, KVCacheGroupSpec
from kvjax.core.step_plan import GroupPlan, PageCopies, StepPlan, TableUpdate

_NO_IDS = np.zeros(0, np.int32)
_NO_IDS.flags.writeable = False
NO_UPDATE = TableUpdate(_NO_IDS.astype(np.int64), _NO_IDS.astype(np.int64), _NO_IDS)
NO_COPIES = PageCopies(_NO_IDS, _NO_IDS)


class StepTables(Protocol):
    """What a plan is read from: `KVCacheManager`, or anything with its tables."""

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """Groups, in the order of block tables."""

    @property
    def request_table(self) -> Any:
        """token_ids int32[rows, cols], num_tokens and num_computed_tokens int64[rows], requests by row."""

    def block_tables(self, group_id: int) -> np.ndarray:
        """The group's int32[rows, columns]."""

    def num_blocks(self, group_id: int) -> np.ndarray:
        """Blocks in each row of the group's table."""


def build_step_plan(
    tables: StepTables,
    rows: np.ndarray,  # int64[S] distinct rows in scheduling order
    num_new_tokens: np.ndarray,  # int[S] >= 1; blocks for them are allocated
    *,
    wants_logits: np.ndarray | None = None,  # bool[S]; None: requests that reach their last known token
    last_token_source: np.ndarray | None = None,  # int[S] -1: known, else index into the tokens sampled a step before
    new_blocks: Sequence[TableUpdate] | None = None,  # per group, since the last step
    page_copies: Sequence[PageCopies] | None = None,  # per pool
    pages_to_zero: Sequence[np.ndarray] | None = None,  # per pool
) -> StepPlan:
    """The plan of one step. Call it after the blocks are allocated and before `num_computed_tokens` advances.

    Requests come out as decode (one new token), prefill (empty), mixed, each in scheduling order; `plan.rows` tells.
    With `last_token_source` the last new token of a request need not be in the table yet.

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
    positions, token_rows = _flat_positions(rows, computed, num_new, starts)
    token_ids = table.token_ids[token_rows, np.minimum(positions, table.token_ids.shape[1] - 1)].astype(np.int32)
    token_source = np.full(positions.size, -1, np.int32)
    token_source[starts[1:] - 1] = source
    token_ids[token_source >= 0] = 0
    wanted = seq_lens >= known if wants_logits is None else np.asarray(wants_logits, bool)[order]
    num_decode = int(np.count_nonzero(num_new == 1))
    config = tables.kv_cache_config
    updates = [NO_UPDATE] * len(config.kv_cache_groups) if new_blocks is None else new_blocks
    return StepPlan(
        request_ids=_request_ids(table.requests, rows),
        rows=rows,
        num_new_tokens=num_new.astype(np.int32),
        num_computed_tokens=computed.astype(np.int32),
        token_ids=token_ids,
        positions=positions.astype(np.int32),
        query_start_loc=starts.astype(np.int32),
        logits_indices=(starts[1:] - 1)[wanted].astype(np.int32),
        distribution=np.array([num_decode, num_decode, rows.size], np.int32),
        token_source=token_source,
        page_copies=(NO_COPIES,) * len(config.pools) if page_copies is None else tuple(page_copies),
        pages_to_zero=(_NO_IDS,) * len(config.pools) if pages_to_zero is None else tuple(pages_to_zero),
        groups=tuple(
            _group_plan(tables, group_id, group, rows, seq_lens, positions, num_new, update)
            for group_id, (group, update) in enumerate(zip(config.kv_cache_groups, updates, strict=True))
        ),
    )


def logits_requests(plan: StepPlan) -> np.ndarray:  # int64[N]
    """Which request of the plan each row of logits belongs to, as indices into `plan.request_ids`."""
    return np.searchsorted(plan.query_start_loc, plan.logits_indices, side="right") - 1


def _flat_positions(
    rows: np.ndarray, computed: np.ndarray, num_new: np.ndarray, starts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(position, table row) of every new token, int64[T] each."""
    if rows.size == starts[-1]:  # one token each: nothing to repeat
        return computed, rows
    positions = np.arange(starts[-1]) + np.repeat(computed - starts[:-1], num_new)
    return positions, np.repeat(rows, num_new)


def _group_plan(
    tables: StepTables,
    group_id: int,
    group: KVCacheGroupSpec,
    rows: np.ndarray,
    seq_lens: np.ndarray,
    positions: np.ndarray,
    num_new: np.ndarray,
    new_blocks: TableUpdate,
) -> GroupPlan:
    block_size = group.kv_cache_spec.block_size
    num_blocks = np.asarray(tables.num_blocks(group_id)[rows], np.int64)
    short = np.flatnonzero(num_blocks * block_size < seq_lens)
    if short.size:
        i = short[0]
        raise ValueError(
            f"row {rows[i]}, group {group_id}: expected blocks for {seq_lens[i]} tokens, got {num_blocks[i]} blocks of "
            f"{block_size}; allocate them before the step is built"
        )
    table = tables.block_tables(group_id)
    num_columns = int(num_blocks.max(initial=0))
    block_tables = table[:, :num_columns].take(rows, axis=0)
    if rows.size and num_blocks.min() < num_columns:
        block_tables[np.arange(num_columns) >= num_blocks[:, None]] = 0
    columns, offsets = np.divmod(positions, block_size)
    requests = np.arange(rows.size) if positions.size == rows.size else np.repeat(np.arange(rows.size), num_new)
    block_ids = block_tables[requests, columns]
    return GroupPlan(
        pool_id=group.pool_id,
        kind=group.kv_cache_spec.kind,
        block_tables=block_tables,
        new_blocks=new_blocks,
        seq_lens=seq_lens.astype(np.int32),
        slot_mapping=np.where(block_ids > 0, block_ids * block_size + offsets, -1).astype(np.int32),
    )


def _request_ids(requests: Sequence[Any], rows: np.ndarray) -> tuple[str, ...]:
    """Ids of the requests in `rows`."""
    if not rows.size:
        return ()
    chosen = itemgetter(*rows.tolist())(requests)
    try:
        return tuple(map(attrgetter("request_id"), chosen if rows.size > 1 else (chosen,)))
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


def _check_tokens(rows: np.ndarray, seq_lens: np.ndarray, available: np.ndarray) -> None:
    over = np.flatnonzero(seq_lens > available)
    if over.size:
        i = over[0]
        raise ValueError(
            f"row {rows[i]}: a step up to token {seq_lens[i]} needs tokens, the request has {available[i]}"
        )


__all__ = ["NO_COPIES", "NO_UPDATE", "StepTables", "build_step_plan", "logits_requests"]
