"""The groups' parts of a step: how long their requests are, and where the step reads and writes.

Flow:    tables of all groups, tokens of a step -> [group_plans] -> GroupPlan of each group -> StepPlan
Source:  ARCHITECTURE.md, "The step plan"

Groups of one spec in one pool have tables side by side and rows of one length. What is asked of the tables is asked
once for all of them, and what depends on the block size alone is computed once for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from kvjax.core.spec import KVCacheConfig, KVCacheGroupSpec, StatePages
from kvjax.core.step.step_plan import CompressedStates, GroupPlan, TableUpdate


class GroupTables(NamedTuple):
    """Block tables of groups of one spec in one pool: live, for reading only, and replaced when they grow."""

    group_ids: tuple[int, ...]
    block_size: int  # tokens of a block, those on all ranks of context parallelism
    entries: np.ndarray  # int32[groups, rows, columns], 0 beyond each row's blocks
    num_blocks: np.ndarray  # int64[rows] blocks in each row, nulls included
    num_checkpoints: int = 0  # most states that a step leaves of a request on its way


class BlockTables(Protocol):
    """The tables that the groups' plans are read from."""

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """Groups, in the order of plans."""

    def group_tables(self) -> Sequence[GroupTables]:
        """Tables of every group, each once."""

    def reserved_blocks(self, group_id: int) -> np.ndarray:
        """int32[k] blocks that the group's spec reserves; asked for where it reserves any."""


class TableShape(Protocol):
    """How large a step's block tables are made: a `Bucket` of the device layer, for example."""

    @property
    def num_requests(self) -> int:
        """Rows, at least the step's requests."""

    @property
    def num_columns(self) -> int:
        """Columns, at least those of the longest row."""


# (tokens, requests, columns) -> shape; of a step with drafts also `num_drafts` and `longest`: the most drafts, and the
# most tokens, of a request.
PickShape: TypeAlias = Callable[..., TableShape]

_Places: TypeAlias = tuple[np.ndarray, np.ndarray]  # int64[T] table columns, int32[T] offsets in the blocks


class StepTokens(NamedTuple):
    """The new tokens of all requests, one after another."""

    rows: np.ndarray  # int64[T] row of the request table
    positions: np.ndarray  # int64[T]

    @classmethod
    def of(cls, rows: np.ndarray, computed: np.ndarray, num_new: np.ndarray, starts: np.ndarray) -> StepTokens:
        """The tokens of int64[S] rows with so many tokens computed and new; they begin at int64[S + 1] `starts`."""
        if rows.size == starts[-1]:  # one token each: nothing to repeat
            return cls(rows, computed)
        positions = np.arange(starts[-1]) + np.repeat(computed - starts[:-1], num_new)
        return cls(np.repeat(rows, num_new), positions)

    def states(self, tokens_per_state: int) -> StepTokens:
        """The compressed states that these tokens complete, in place of tokens."""
        completes = (self.positions + 1) % tokens_per_state == 0
        return StepTokens(self.rows[completes], self.positions[completes] // tokens_per_state)

    def places(self, block_size: int) -> _Places:
        """The column and offset of every token."""
        columns = self.positions // block_size
        return columns, (self.positions - columns * block_size).astype(np.int32)


def starts_of(counts: np.ndarray) -> np.ndarray:  # int64[n + 1]
    """Where each of int64[n] counts begins, and where the last ends."""
    starts = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


class EncoderTokens(NamedTuple):
    """Where the encoder tokens of the step's requests are told; asked for groups of cross attention only."""

    table: Any  # with num_encoder_tokens int64[rows]
    rows: np.ndarray  # int64[S]
    computed: np.ndarray  # int64[S]
    writes: np.ndarray | None  # bool[S] whose are written in this step; None: of requests with nothing computed

    @property
    def lengths(self) -> np.ndarray:  # int64[S]
        """Encoder tokens of each request."""
        return np.asarray(self.table.num_encoder_tokens[self.rows], np.int64)

    @property
    def starts(self) -> np.ndarray:  # int64[S + 1]
        """Where those of each request begin that are written, one request after another."""
        writes = self.computed == 0 if self.writes is None else self.writes
        return starts_of(np.where(writes, self.lengths, 0))

    def tokens(self, starts: np.ndarray) -> StepTokens:
        """The tokens that are written."""
        counts = np.diff(starts)
        return StepTokens(np.repeat(self.rows, counts), np.arange(starts[-1]) - np.repeat(starts[:-1], counts))


class GroupsStep(NamedTuple):
    """What the groups' plans are made from."""

    rows: np.ndarray  # int64[S]
    computed: np.ndarray  # int64[S] tokens before the step
    seq_lens: np.ndarray  # int64[S] tokens after it
    plan_lens: np.ndarray  # int32[S] the same, for the plans
    tokens: StepTokens
    encoder: EncoderTokens
    num_drafts: np.ndarray | None  # int[S] of the new tokens; None: there are none


class _Held(NamedTuple):
    """Tables of groups, and how much of them the step's requests hold."""

    tables: GroupTables
    num_blocks: np.ndarray  # int64[S] those of the step's requests
    num_columns: int  # the most of them


def group_plans(
    tables: BlockTables,
    step: GroupsStep,
    updates: Sequence[TableUpdate],  # per group
    pick_shape: PickShape | None,
) -> tuple[GroupPlan, ...]:
    """Every group's part of the step.

    Raises:
        ValueError: a request's blocks do not hold its tokens, or `pick_shape` finds no shape.
    """
    groups = tables.kv_cache_config.kv_cache_groups
    held = [_held(own, step.rows) for own in tables.group_tables()]
    shape = None
    if pick_shape is not None:
        shape = _picked(pick_shape, step, max([1, *[own.num_columns for own in held]]))
    places: dict[int, _Places] = {}
    plans: list[GroupPlan | None] = [None] * len(groups)
    for own in held:
        group_ids, size = own.tables.group_ids, own.tables.block_size
        if size not in places:
            places[size] = step.tokens.places(size)
        spec = groups[group_ids[0]].kv_cache_spec
        block_tables, padded = _copied_tables(own, step.rows, shape)
        each = _lengths_and_places([groups[group_id] for group_id in group_ids], own, step, places[size])
        for place, (group_id, lengths_and_places) in enumerate(zip(group_ids, each, strict=True)):
            plans[group_id] = GroupPlan(
                pool_id=groups[group_id].pool_id,
                kind=spec.kind,
                block_tables=block_tables[place],
                padded_tables=None if padded is None else padded[place],
                new_blocks=updates[group_id],
                reserved_blocks=tables.reserved_blocks(group_id) if spec.num_reserved_blocks else None,
                **lengths_and_places,
            )
    return tuple(plans)  # type: ignore[arg-type]  # every group has tables


def _held(tables: GroupTables, rows: np.ndarray) -> _Held:
    num_blocks = tables.num_blocks[rows]
    return _Held(tables, num_blocks, int(np.maximum.reduce(num_blocks, initial=0)))


def _lengths_and_places(
    groups: Sequence[KVCacheGroupSpec], own: _Held, step: GroupsStep, places: _Places
) -> Sequence[dict[str, Any]]:
    """Per group the fields of its plan that say how long its requests are, and where this step reads and writes."""
    spec, tables = groups[0].kv_cache_spec, own.tables
    if spec.state_pages is not None:
        return [_state_fields(spec.state_pages, own, place, step) for place in range(len(groups))]
    if spec.reads_encoder:
        lengths, starts = step.encoder.lengths, step.encoder.starts
        tokens = step.encoder.tokens(starts)
        _check_blocks(step.rows, own, lengths)
        slots = _slots(tables.entries, tables.block_size, tokens.rows, tokens.places(tables.block_size))
        told = {"seq_lens": lengths.astype(np.int32), "encoder_starts": starts.astype(np.int32)}
        return [{**told, "slot_mapping": of_group} for of_group in slots]
    _check_blocks(step.rows, own, step.seq_lens)
    slots = _slots(tables.entries, tables.block_size, step.tokens.rows, places)
    plain: list[dict[str, Any]] = [{"seq_lens": step.plan_lens, "slot_mapping": of_group} for of_group in slots]
    if spec.rswa_window is not None:
        prompts = step.encoder.table.num_prompt_tokens[step.rows].astype(np.int32)
        return [{**fields, "prompt_tokens": prompts} for fields in plain]
    return [
        fields if group.tokens_per_state == {1} else _compressed_fields(group.tokens_per_state, own, place, step)
        for place, (group, fields) in enumerate(zip(groups, plain, strict=True))
    ]


def _picked(pick_shape: PickShape, step: GroupsStep, num_columns: int) -> TableShape:
    num_requests = step.rows.size
    shape = pick_shape(step.tokens.rows.size, num_requests, num_columns)
    if shape.num_requests < num_requests or shape.num_columns < num_columns:
        raise ValueError(
            f"expected a shape of at least {num_requests} requests and {num_columns} columns, got "
            f"{shape.num_requests} and {shape.num_columns}"
        )
    return shape


def _copied_tables(own: _Held, rows: np.ndarray, shape: TableShape | None) -> tuple[np.ndarray, np.ndarray | None]:
    """The requests' rows of the groups' tables, and the array of `shape` that they are the start of."""
    entries = own.tables.entries
    if shape is None:
        return _rows_of(entries, rows, own.num_columns), None
    num_rows, num_columns = shape.num_requests, shape.num_columns
    if rows.size == num_rows and entries.shape[2] >= num_columns:
        padded = _rows_of(entries, rows, num_columns)
    elif rows.size and entries.shape[2] >= num_columns:
        index = np.full(num_rows, rows[0])
        index[: rows.size] = rows
        padded = _rows_of(entries, index, num_columns)
        padded[:, rows.size :] = 0
    else:
        padded = np.zeros((len(entries), num_rows, num_columns), np.int32)
        padded[:, : rows.size, : own.num_columns] = entries[:, rows, : own.num_columns]
    padded.flags.writeable = False
    return padded[:, : rows.size, : own.num_columns], padded


def _rows_of(entries: np.ndarray, rows: np.ndarray, num_columns: int) -> np.ndarray:  # int32[groups, rows, columns]
    """A copy of the first columns of int64[n] rows."""
    if len(entries) == 1:  # faster than a slice of one
        return entries[0][rows, :num_columns][None]
    return entries[:, rows, :num_columns]


def _slots(
    table: np.ndarray,  # int32[rows, columns], or of several groups
    block_size: int,
    rows: np.ndarray,  # int64[T]
    places: _Places,
) -> np.ndarray:  # int32[T], or of each group
    """Where the states of int64[T] rows at these places are written; -1 in null blocks."""
    columns, offsets = places
    is_single = len(table) == 1 and table.ndim == 3  # an index of two is faster
    slots = table[0][rows, columns][None] if is_single else table[..., rows, columns]
    is_null = None if np.count_nonzero(slots) == slots.size else slots == 0
    slots *= block_size
    slots += offsets
    if is_null is not None:
        slots[is_null] = -1
    return slots


def _compressed_fields(ratios: frozenset[int], own: _Held, place: int, step: GroupsStep) -> dict[str, Any]:
    """Lengths and slots of states that stand for several tokens, for each number of tokens."""
    table, block_size, compressed = own.tables.entries[place], own.tables.block_size, []
    for ratio in sorted(ratios):
        states, size = step.tokens.states(ratio), block_size // ratio
        slots = _slots(table, size, states.rows, states.places(size))
        compressed.append(CompressedStates(ratio, (step.seq_lens // ratio).astype(np.int32), slots))
    if len(compressed) == 1:
        (only,) = compressed
        return {"seq_lens": only.seq_lens, "slot_mapping": only.slot_mapping, "compressed": (only,)}
    slots = _slots(table, block_size, step.tokens.rows, step.tokens.places(block_size))
    return {"seq_lens": step.plan_lens, "slot_mapping": slots, "compressed": tuple(compressed)}


def _state_fields(pages: StatePages, own: _Held, place: int, step: GroupsStep) -> dict[str, Any]:
    """The state that each request of a recurrent group starts from, and where it leaves one; tokens have no slots."""
    group_id, table, counts = own.tables.group_ids[place], own.tables.entries[place], own.tables.num_blocks
    short = pages.most_tokens(own.num_blocks) < step.seq_lens
    if short.any():
        i = int(short.argmax())
        raise ValueError(
            f"row {step.rows[i]}, group {group_id}: expected the blocks of a state after {step.seq_lens[i]} "
            f"tokens, got {own.num_blocks[i]} blocks; allocate them before the step is built"
        )
    write = pages.pages_of_states(table, counts, step.rows, step.seq_lens)
    if step.num_drafts is not None and step.num_drafts.max() > pages.num_drafts:
        i = int(step.num_drafts.argmax())
        raise ValueError(
            f"row {step.rows[i]}, group {group_id}: expected at most {pages.num_drafts} drafts, as there are "
            f"states for, got {step.num_drafts[i]}"
        )
    if pages.num_speculative_blocks:
        before = pages.pages_of_drafts(table, counts, step.rows, step.seq_lens)
        write = _with_drafts(write, before, step.seq_lens - step.computed, step.num_drafts)
    has_initial = step.computed > 0
    read = np.where(has_initial, pages.pages_of_states(table, counts, step.rows, step.computed), 0)
    return {
        "seq_lens": step.plan_lens,
        "slot_mapping": np.full(step.tokens.rows.size, -1, np.int32),
        "state_read": read.astype(np.int32),
        "state_write": write.astype(np.int32),
        "has_initial_state": has_initial,
        **(_checkpoint_fields(own, place, step) if own.tables.num_checkpoints else {}),
    }


def _checkpoint_fields(own: _Held, place: int, step: GroupsStep) -> dict[str, np.ndarray]:
    """The states that requests leave on their way: where a column before that of the last state has a block."""
    if step.tokens.rows.size == step.rows.size:  # one token each
        return {}
    table, size, most = own.tables.entries[place], own.tables.block_size, own.tables.num_checkpoints
    ends, pages = np.zeros((2, step.rows.size, most), np.int32)
    firsts, lasts = step.computed // size, (step.seq_lens - 1) // size
    for i in (lasts > firsts).nonzero()[0].tolist():
        row, first = table[step.rows[i]], firsts.item(i)
        columns = first + row[first : lasts.item(i)].nonzero()[0][-most:]
        ends[i, : columns.size] = (columns + 1) * size - step.computed[i]
        pages[i, : columns.size] = row[columns]
    return {"checkpoint_ends": ends, "checkpoint_pages": pages}


def _with_drafts(
    write: np.ndarray, before: np.ndarray, num_new: np.ndarray, num_drafts: np.ndarray | None
) -> np.ndarray:  # int32[S, 1 + s]
    """Pages of states after the last of int64[S] new tokens; of more than 1 + s after the last one and drafts only."""
    pages = np.concatenate([before, write[:, None]], axis=1)
    most = pages.shape[1]
    num_kept = np.where(num_new > most, 1 if num_drafts is None else 1 + num_drafts, num_new)
    pages[np.arange(most) < most - num_kept[:, None]] = 0
    return pages


def _check_blocks(rows: np.ndarray, own: _Held, seq_lens: np.ndarray) -> None:
    group_id, block_size = own.tables.group_ids[0], own.tables.block_size
    short = own.num_blocks * block_size < seq_lens
    if np.count_nonzero(short):
        i = int(short.argmax())
        raise ValueError(
            f"row {rows[i]}, group {group_id}: expected blocks for {seq_lens[i]} tokens, got {own.num_blocks[i]} "
            f"blocks of {block_size}; allocate them before the step is built"
        )


__all__ = [
    "BlockTables",
    "EncoderTokens",
    "GroupTables",
    "GroupsStep",
    "PickShape",
    "StepTokens",
    "group_plans",
    "starts_of",
]
