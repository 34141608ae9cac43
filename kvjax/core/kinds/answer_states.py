"""Recurrent states of what a request generates: registered at few lengths, and of these only the last ones stay.

Flow:    RecurrentManager -> [AnswerStates] -> which columns rows use, and which registered blocks are forgotten

A prompt's states are registered wherever a step ends with a block, since another prompt may part there. An answer is
gone back to at its end, by the next prompt of a chat. So behind a row's checkpoints

    a state is registered every `ANSWER_TOKENS`, or `retention_interval`    the row passes over the columns between
    it is forgotten some steps after the next one is there                  but for those of the interval

With EAGLE the one before stays too, since a hit drops tokens. A state that somebody holds or hit is not forgotten.
"""

from __future__ import annotations

import numpy as np

from kvjax.core.kinds.retention import Retention
from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.spec import cdiv
from kvjax.core.tables.small_arrays import any_true

ANSWER_TOKENS = 64
STEPS = 4  # what they leave to forget is forgotten at once


class AnswerStates:
    """Of the rows of one manager. Rows are int64[n]; a request's numbers are known from its admission on."""

    def __init__(
        self, pool: BlockPool, num_groups: int, block_size: int, retention: Retention, max_model_len: int
    ) -> None:
        self._pool, self._block_size, self._retention = pool, block_size, retention
        unit = cdiv(ANSWER_TOKENS, retention.alignment) * retention.alignment
        self._unit = min(unit, retention.interval) if retention.interval else unit  # tokens
        self._most_columns = cdiv(max_model_len, block_size)
        self._ids = np.zeros((retention.num_last, num_groups, 0), np.int32)  # [.., G, rows] newest first
        self._hashes = np.empty((retention.num_last, 0), np.object_)
        self._lengths = np.zeros((retention.num_last, 0), np.int64)  # tokens of each state, 0: none
        self._superseded: list[tuple[np.ndarray, np.ndarray]] = []  # int32[G, n] blocks, object[n] hashes
        self._num_steps = 0

    def reserve_rows(self, num_rows: int) -> None:
        """Makes the arrays hold at least `num_rows` rows."""
        missing = num_rows - self._lengths.shape[1]
        if missing > 0:
            self._ids = np.pad(self._ids, ((0, 0), (0, 0), (0, missing)))
            self._lengths = np.pad(self._lengths, ((0, 0), (0, missing)))
            no_hashes = np.empty((len(self._hashes), missing), np.object_)
            self._hashes = np.concatenate((self._hashes, no_hashes), axis=1)

    def leave(self, row: int) -> None:
        """The row's request ends: its states stay."""
        self._lengths[:, row] = 0

    # -- columns ----------------------------------------------------------------------------------------------------

    def end_column(self, row: int, num_tokens: int) -> int:
        """How many columns end where the one of the state after `num_tokens` tokens does."""
        if num_tokens <= self._retention.longest.item(row):
            return cdiv(num_tokens, self._block_size)
        return min(cdiv(num_tokens, self._unit) * self._unit // self._block_size, self._most_columns)

    def end_columns(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:  # int64[n]
        """`end_column` of many rows."""
        unit, size = self._unit, self._block_size
        ends = np.minimum((num_tokens + (unit - 1)) // unit * (unit // size), self._most_columns)
        return np.where(num_tokens <= self._retention.longest[rows], (num_tokens + (size - 1)) // size, ends)

    def full_column(self, row: int, num_tokens: int) -> int:
        """How many columns end at or before the last state to register of a row's first `num_tokens` tokens."""
        longest = self._retention.longest.item(row)
        registered = num_tokens if num_tokens <= longest else max(num_tokens // self._unit * self._unit, longest)
        return registered // self._block_size

    def full_columns(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:  # int64[n]
        """`full_column` of many rows."""
        longest = np.minimum(num_tokens, self._retention.longest[rows])
        behind = np.where(num_tokens > longest, num_tokens // self._unit * self._unit, 0)
        return np.maximum(longest, behind) // self._block_size

    def next_full(self, row: int, num_columns: int) -> int:
        """The fewest tokens that fill more than so many columns."""
        return int(self.next_fulls(np.array([row]), np.array([num_columns]))[0])

    def next_fulls(self, rows: np.ndarray, num_columns: np.ndarray) -> np.ndarray:  # int64[n]
        """`next_full` of many rows."""
        tokens, unit = num_columns * self._block_size, self._unit
        return np.where(tokens < self._retention.longest[rows], tokens + self._block_size, tokens // unit * unit + unit)

    # -- what is forgotten ------------------------------------------------------------------------------------------

    def add(self, rows: np.ndarray, columns: np.ndarray, ids: np.ndarray, hashes: np.ndarray) -> None:
        """Blocks int32[G, n] in int64[n] columns of rows, one row's next to each other, have object[n] hashes now."""
        is_last = ids[0] != 0
        is_last[:-1] &= rows[1:] != rows[:-1]
        if not is_last.all():
            rows, columns, ids, hashes = rows[is_last], columns[is_last], ids[:, is_last], hashes[is_last]
        self._note_superseded(rows)
        for each in (self._ids, self._hashes, self._lengths):
            each[1:, ..., rows] = each[:-1, ..., rows]
        self._ids[0][:, rows], self._hashes[0, rows] = ids, hashes
        self._lengths[0, rows] = (columns + 1) * self._block_size

    def _note_superseded(self, rows: np.ndarray) -> None:
        """The oldest state of each row is to be forgotten, if it is behind the row's checkpoints and no interval's."""
        lengths, interval = self._lengths[-1, rows], self._retention.interval
        is_superseded = lengths > self._retention.longest[rows]
        if interval:
            is_superseded &= lengths % interval != 0
        if any_true(is_superseded):
            rows = rows[is_superseded]
            self._superseded.append((self._ids[-1][:, rows], self._hashes[-1, rows]))

    def new_step_starts(self) -> None:
        """Forgets what the last steps superseded."""
        self._num_steps += 1
        if self._superseded and self._num_steps % STEPS == 0:
            ids, hashes = zip(*self._superseded, strict=True)
            self._superseded.clear()
            self._pool.forget_doubtful(np.concatenate(ids, axis=1), np.concatenate(hashes))


__all__ = ["AnswerStates"]
