"""Sparse checkpoints: which blocks of windowed and recurrent layers are worth a place in the prefix cache.

Flow:    KVCacheManager(retention_interval=k) -> [Retention] -> SingleTypeKVCacheManager registers what it keeps
Source:  rules of vLLM 0.33 (prefix_cache_retention_interval) for sliding windows and Mamba

A hit of L tokens needs all blocks of full attention before L, but only the last few of a window and one state of a
recurrent layer. So these kinds need to be cached at few lengths L only, checkpoints; then a hit ends at one of them:

    every k tokens      where k = retention_interval > 0
    end of the request  as it is admitted: the last length that the same prompt (or one that it begins) can hit; with
                        `retention_ends="resent"` only where vLLM 0.33 keeps one, see `lengths_for`
    shared prefix       the longest prefix that the groups which keep everything had cached when the request was looked
                        up; a prefix that two requests share is likely to be asked for again

What a checkpoint at L keeps, with blocks of b tokens, of which a hit needs `num_before` before L, and with EAGLE one
(`num_after`) behind it, which it drops:

    blocks     0 ... | L/b - num_before ... L/b - 1 | L/b ... L/b + num_after - 1 | ...

Without `retention_interval` every length that a hit can have is a checkpoint (`SegmentEnds`). Where block sizes differ
that still leaves out blocks of windows that end too far from a multiple of the hits' alignment, as in vLLM since 0.22.

Blocks between checkpoints are never registered. They are reused like any other: a policy that takes unhashed blocks
first (all but plain "lru") then leaves more room to full attention. Lengths are multiples of the hits' alignment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

NUM_LENGTHS = 4  # of a row: two ends, a shared prefix, and what EAGLE leaves of it
ENDS = ("all", "resent")  # which ends of a request are checkpoints


@dataclass(frozen=True)
class CheckpointBlocks:
    """What one kind keeps of a checkpoint at length L."""

    block_size: int
    num_before: int  # blocks that end at L or before
    num_after: int  # blocks that begin at L or behind
    num_first: int = 0  # of a request's first blocks, which every checkpoint needs


NO_CHECKPOINT = CheckpointBlocks(1, 0, 0)  # of kinds that need all before L, or not always as many


class Checkpoints(Protocol):
    """Which blocks are registered."""

    def keeps(self, rows: np.ndarray, columns: np.ndarray, kind: CheckpointBlocks) -> np.ndarray:  # bool[n]
        """Which of the blocks at int64[n] rows and columns a checkpoint needs."""

    def keeps_all(self, kind: CheckpointBlocks) -> bool:
        """Whether that is every block of a kind."""


class SegmentEnds:
    """A checkpoint every `interval` tokens, in all rows alike. `keeps` costs some microseconds a call."""

    def __init__(self, interval: int) -> None:
        """`interval` is a multiple of the block sizes."""
        self._interval = interval

    def keeps(self, rows: np.ndarray, columns: np.ndarray, kind: CheckpointBlocks) -> np.ndarray:  # bool[n]
        """Which of the blocks at int64[n] columns stand near enough before or behind a multiple of the interval."""
        per_segment = self._interval // kind.block_size
        places = columns - kind.num_after  # a checkpoint at block e keeps the places e - span ... e - 1
        segment_ends = np.maximum(places // per_segment + 1, 1) * per_segment
        return (places >= segment_ends - (kind.num_before + kind.num_after)) | (columns < kind.num_first)

    def keeps_all(self, kind: CheckpointBlocks) -> bool:
        """Whether what a checkpoint keeps reaches back to the one before."""
        return kind.num_before + kind.num_after >= self._interval // kind.block_size


class Retention:
    """The checkpoints of every row of one manager. `keeps` costs some microseconds a call."""

    def __init__(self, interval: int, alignment: int, dropped_tokens: int, ends: str = "all") -> None:
        """
        Args:
            interval: tokens from one checkpoint to the next; 0: none but a request's own.
            alignment: tokens of which every hit is a multiple.
            dropped_tokens: tokens that EAGLE drops from a hit; 0 without.
            ends: one of `ENDS`.

        Raises:
            ValueError: the interval is negative or no multiple of the alignment.
        """
        if interval < 0 or interval % alignment:
            raise ValueError(
                f"expected retention_interval as a multiple of {alignment} (the LCM of the block sizes), or 0, "
                f"got {interval}"
            )
        self._interval = interval
        self._segment_ends = SegmentEnds(interval) if interval else None
        self._alignment = alignment
        self._dropped_tokens = dropped_tokens
        self._ends = ends
        self._lengths = np.zeros((0, NUM_LENGTHS), np.int64)  # [rows], 0: none

    def reserve_rows(self, num_rows: int) -> None:
        """Makes the arrays hold at least `num_rows` rows."""
        missing = num_rows - self._lengths.shape[0]
        if missing > 0:
            self._lengths = np.pad(self._lengths, ((0, missing), (0, 0)))

    def lengths_for(self, num_tokens: int, num_shared_tokens: int) -> tuple[int, ...]:
        """Checkpoints of a request's own: it has so many tokens, and shares as many with what is cached.

        The same prompt can hit all its tokens but the last, a longer one all of them. Of "resent" ends only the first
        counts, but with EAGLE both do, each a whole alignment earlier, and what is left of the shared prefix.
        """
        size, dropped = self._alignment, self._dropped_tokens
        lengths: tuple[int, ...] = (num_tokens - dropped - 1, num_tokens - dropped, num_shared_tokens, 0)
        if self._ends == "resent":
            ends = (num_tokens - 1 - size, num_tokens - size) if dropped else (num_tokens - 1, 0)
            lengths = (*ends, num_shared_tokens, num_shared_tokens - dropped)
        return tuple(max(length, 0) // size * size for length in lengths)

    def note_admission(self, row: int, num_tokens: int, num_shared_tokens: int) -> None:
        """Such a request begins in a row."""
        self._lengths[row] = self.lengths_for(num_tokens, num_shared_tokens)

    def share_row(self, row: int, new_rows: np.ndarray) -> None:
        """Int64[n] new rows go on from a row."""
        self._lengths[new_rows] = self._lengths[row]

    def lengths_of(self, row: int) -> tuple[int, ...]:
        """Checkpoints of the row's own."""
        return tuple(self._lengths[row].tolist())

    def step_end(self, start: int, end: int, lengths: Iterable[int]) -> int:
        """Where a step from `start` to `end` tokens should end, so that states exist where they are kept.

        That is the first of the request's own checkpoints, `lengths`; before it, the last one of the interval.
        """
        end = min([end, *(length for length in lengths if length > start)])
        last = end // self._interval * self._interval if self._interval else 0
        return last if last > start else end

    def keeps(self, rows: np.ndarray, columns: np.ndarray, kind: CheckpointBlocks) -> np.ndarray:  # bool[n]
        """Which of the blocks at int64[n] rows and columns a checkpoint needs."""
        places = columns - kind.num_after  # a checkpoint at block e keeps the places e - span ... e - 1
        span = kind.num_before + kind.num_after
        ends = self._lengths[rows] // kind.block_size  # [n, NUM_LENGTHS]
        kept = ((ends > 0) & (places[:, None] < ends) & (places[:, None] >= ends - span)).any(axis=1)
        kept |= columns < kind.num_first
        if self._segment_ends is not None:
            kept |= self._segment_ends.keeps(rows, columns, kind)
        return kept

    def keeps_all(self, kind: CheckpointBlocks) -> bool:
        """Whether the interval's checkpoints keep every block."""
        return self._segment_ends is not None and self._segment_ends.keeps_all(kind)
