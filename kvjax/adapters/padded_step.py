"""A step plan's lengths, offsets and tables in fixed shapes, as every stack's compiled step wants them.

Flow:    StepPlan, StepShape -> [padded] -> a stack's metadata

Axis names: T tokens, S requests, P table columns, all padded. Rows beyond the step's have length 0 and table entries 0;
offsets repeat the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvjax.core.step.step_plan import GroupPlan, StepPlan


class StepShape(Protocol):
    """Padded sizes of a step: a `kvjax.device.Bucket`, for example."""

    @property
    def num_tokens(self) -> int:
        """T."""

    @property
    def num_requests(self) -> int:
        """S."""

    @property
    def num_columns(self) -> int:
        """P."""


@dataclass(frozen=True)
class Shape:
    """A `StepShape` in its plainest form."""

    num_tokens: int
    num_requests: int
    num_columns: int


@dataclass(frozen=True)
class PaddedGroup:
    """One KV-cache group's part of a step whose groups all hold tokens, each at its place in the sequence."""

    positions: np.ndarray  # int32[T], or [3, T] of a multimodal rotary embedding
    block_tables: np.ndarray  # int32[S, P]
    seq_lens: np.ndarray  # int32[S]
    query_start_loc: np.ndarray  # int32[S + 1]
    distribution: np.ndarray  # int32[3] ends of the decode, prefill and mixed requests
    slot_mapping: np.ndarray  # int32[T], -1 beyond the step's tokens
    states: np.ndarray | None  # int32[S] page of the recurrent state that a request reads and writes


def padded(plan: StepPlan, group: GroupPlan, shape: StepShape) -> PaddedGroup:
    """The part of `plan` that is `group`'s, in `shape`.

    Raises:
        ValueError: the step is larger than the shape.
        NotImplementedError: the group is of a kind that no stack's metadata tells of: encoder tokens, compressed
            states, blocks that the group reserves, states of drafts, or a state written elsewhere than read.
    """
    sizes = {
        "tokens": (plan.num_tokens, shape.num_tokens),
        "requests": (plan.num_requests, shape.num_requests),
        "table columns": (_used_columns(group), shape.num_columns),
    }
    for name, (size, room) in sizes.items():
        if size > room:
            raise ValueError(f"expected a shape of at least {size} {name}, got {room}")
    tables = np.zeros((shape.num_requests, shape.num_columns), np.int32)
    columns = min(shape.num_columns, group.block_tables.shape[1])
    tables[: plan.num_requests, :columns] = group.block_tables[:, :columns]
    starts = plan.query_start_loc
    return PaddedGroup(
        positions=_pad(plan.positions, shape.num_tokens, 0),
        block_tables=tables,
        seq_lens=_pad(group.seq_lens, shape.num_requests, 0),
        query_start_loc=_pad(starts, shape.num_requests + 1, int(starts[-1])),
        distribution=plan.distribution.astype(np.int32),
        slot_mapping=_pad(group.slot_mapping, shape.num_tokens, -1),
        states=_states(group, shape.num_requests),
    )


def _used_columns(group: GroupPlan) -> int:
    used = np.flatnonzero(group.block_tables.any(axis=0))
    return int(used[-1]) + 1 if used.size else 0


def _pad(values: np.ndarray, size: int, fill: int) -> np.ndarray:
    """int32 `values`, as many as `size` in the last dimension."""
    out = np.full((*values.shape[:-1], size), fill, np.int32)
    out[..., : values.shape[-1]] = values
    return out


def _states(group: GroupPlan, num_requests: int) -> np.ndarray | None:
    for name, has in (
        ("encoder tokens", group.encoder_starts is not None),
        ("compressed states", bool(group.compressed)),
        ("reserved blocks", group.reserved_blocks is not None and group.reserved_blocks.size > 0),
        ("prompts that all tokens see", group.prompt_tokens is not None),
        ("states of drafts", group.state_write is not None and group.state_write.ndim > 1),
    ):
        if has:
            raise NotImplementedError(f"a {group.kind} group with {name} has no place in the metadata of other stacks")
    if group.state_read is None or group.state_write is None:
        return None
    started = group.has_initial_state
    moved = (group.state_read != group.state_write) & (True if started is None else started)
    if moved.any():
        i = int(np.flatnonzero(moved)[0])
        raise NotImplementedError(
            f"request {i} reads its state in page {group.state_read[i]} and leaves it in page {group.state_write[i]}; "
            "the stack updates states in place: plan without prefix caching of states"
        )
    return _pad(group.state_write, num_requests, 0)
