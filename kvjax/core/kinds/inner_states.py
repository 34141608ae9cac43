"""Recurrent states that are kept where no block ends: at a prompt's last hash, or on a step's way there.

Flow:    InnerSteps -> [InnerStates] of a RecurrentManager -> BlockPool.cache_inner, page copies
Source:  MambaManager of vLLM 0.33 v1/core/single_type_kv_cache_manager.py (prefill checkpoints, partial tails)

A row's columns, b tokens each, where a step from `start` to `end` tokens leaves a checkpoint:

    | null ... null | state | null ... null | checkpoint | running | speculative 1 ... s |
                      start                   (end-1)//b - 1

The checkpoint holds the state after the last tokens whose hash the same prompt can hit; its block does not end there.
The place is fixed, so that a device finds it. Such a step may begin inside a block: that one is never registered. A
step that ends at such a length needs none: its running block is registered, as the row's tail, and when the row writes
there again a copy takes over what it was registered under.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvjax.core.spec import cdiv

NEW_ROW = -1  # in place of the row of a request that has none yet


class Place(NamedTuple):
    """A state, and where it is."""

    num_tokens: int  # before the state
    column: int


@dataclass(frozen=True, kw_only=True)
class CheckpointRule:
    """Where a step leaves a checkpoint."""

    block_size: int  # of the states
    unit: int  # tokens of which every hit is a multiple
    hash_block_size: int
    drops_unit: bool  # whether hits end a unit earlier, since a drafting head computes it again
    num_lookahead: int  # tokens behind a block that its hash covers too
    multiple: int | None  # tokens from the step's start, of which devices leave states; None: they leave none

    def last_length(self, num_tokens: int, unit: int) -> int:
        """The longest hit in units that the first `num_tokens` tokens of a prompt leave to the same prompt."""
        limit = num_tokens if self.drops_unit else num_tokens - max(1, self.num_lookahead)
        return max(limit // unit * unit - unit * self.drops_unit, 0)

    def place(self, start: int, end: int) -> Place | None:
        """What a step from `start` to `end` tokens leaves, if it can."""
        if self.multiple is None:
            return None
        num_tokens, column = self.last_length(end, self.unit), cdiv(end, self.block_size) - 2
        is_inside = start + self.hash_block_size <= num_tokens < end
        is_aligned = start % self.hash_block_size == 0 and (num_tokens - start) % self.multiple == 0
        is_free = column > (start - 1) // self.block_size and column >= 0
        return Place(num_tokens, column) if is_inside and is_aligned and is_free else None


class InnerStates:
    """What the rows of one manager have of this. Rows that are not in a dictionary have none."""

    def __init__(self, rule: CheckpointRule, num_speculative: int, has_tails: bool) -> None:
        self.rule = rule
        self.has_tails = has_tails  # whether the state at a prompt's last hash is registered
        self.keeps_shared = False  # whether the end of a shared prefix is a tail, as a prompt's end
        self._num_speculative = num_speculative
        self.started: set[int] = set()  # rows that have their speculative blocks
        self.checkpoints: dict[int, Place] = {}  # of the latest step
        self.passed: dict[int, int] = {}  # columns up to that which the latest step began inside and passed over
        self.tails: dict[int, Place] = {}  # registered, and written to next
        self.produced: dict[int, Place] = {}  # the same until the request ends or a copy took over
        self.moved: list[tuple[int, Place, list[int]]] = []  # row, tail, and the copies of all groups

    def begin(self, row: int) -> None:
        """The request that `NEW_ROW` stood for has a row."""
        if (place := self.checkpoints.pop(NEW_ROW, None)) is not None:
            self.checkpoints[row] = place
        if (column := self.passed.pop(NEW_ROW, None)) is not None:
            self.passed[row] = column

    def leave(self, row: int) -> None:
        """The row's request ends."""
        self.started.discard(row)
        for places in (self.checkpoints, self.tails, self.produced):
            places.pop(row, None)
        self.passed.pop(row, None)
        self.moved = [entry for entry in self.moved if entry[0] != row]

    def num_new(self, row: int, num_missing: int) -> int:
        """New blocks of one group when a row lacks so many columns; those that it passes over have none."""
        most = 1 + (row in self.checkpoints) + (0 if row in self.started else self._num_speculative)
        return min(max(num_missing, 0), most)

    def note_tail(self, row: int, place: Place) -> None:
        """The running block of a row was registered, and does not end there."""
        self.tails[row] = self.produced[row] = place

    def take_tail(self, row: int) -> Place | None:
        """The row's tail, of which a copy is to be made now."""
        return self.tails.pop(row, None)

    def take_moved(self, row: int) -> list[tuple[Place, list[int]]]:
        """What `note_moved` told of the row since the last call."""
        taken = [(place, copies) for of_row, place, copies in self.moved if of_row == row]
        if taken:
            self.moved = [entry for entry in self.moved if entry[0] != row]
        return taken

    def note_moved(self, row: int, place: Place, copies: list[int]) -> None:
        """Blocks of all groups took over what a row's tail was registered under."""
        if self.produced.pop(row, None) is not None:
            self.moved.append((row, place, copies))


__all__ = ["NEW_ROW", "CheckpointRule", "InnerStates", "Place"]
