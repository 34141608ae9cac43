"""Recurrent states of what a request generates: of those that are registered only the last ones stay.

Flow:    RecurrentManager -> [AnswerStates] -> which registered blocks are forgotten

A prompt's states are registered wherever a step ends with a block, since another prompt may part there. An answer is
gone back to at its end, by the next prompt of a chat. So behind a row's checkpoints

    a state is registered at few lengths           `AnswerColumns`
    it is forgotten once the next one is there     but for those of the interval; what was added is looked at every
                                                   `STEPS` steps, all at once

With EAGLE the one before stays too, since a hit drops tokens. A state that somebody holds or hit is not forgotten.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from kvjax.core.kinds.answer_columns import AnswerColumns
from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.tables.small_arrays import any_true

STEPS = 4


Added: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # as the arguments of `add`


class AnswerStates:
    """The last states of the rows of one manager. A request's numbers are known from its admission on."""

    def __init__(self, pool: BlockPool, num_groups: int, columns: AnswerColumns) -> None:
        self._pool, self._block_size, self._retention = pool, columns.block_size, columns.retention
        num_last = columns.retention.num_last
        self._ids = np.zeros((num_last, num_groups, 0), np.int32)  # [.., G, rows] newest first
        self._hashes = np.empty((num_last, 0), np.object_)
        self._lengths = np.zeros((num_last, 0), np.int64)  # tokens of each state, 0: none
        self._added: list[Added] = []  # no row is in two of them
        self._is_added = np.zeros(0, np.bool_)  # [rows] that have some
        self._superseded: list[tuple[np.ndarray, np.ndarray]] = []  # int32[G, n] blocks, object[n] hashes
        self._num_steps = 0

    def reserve_rows(self, num_rows: int) -> None:
        """Makes the arrays hold at least `num_rows` rows."""
        missing = num_rows - self._lengths.shape[1]
        if missing > 0:
            self._ids = np.pad(self._ids, ((0, 0), (0, 0), (0, missing)))
            self._lengths = np.pad(self._lengths, ((0, 0), (0, missing)))
            self._is_added = np.pad(self._is_added, (0, missing))
            no_hashes = np.empty((len(self._hashes), missing), np.object_)
            self._hashes = np.concatenate((self._hashes, no_hashes), axis=1)

    def leave(self, row: int) -> None:
        """The row's request ends: its states stay."""
        if self._is_added.item(row):
            self._note_added()
        self._lengths[:, row] = 0

    def add(self, rows: np.ndarray, columns: np.ndarray, ids: np.ndarray, hashes: np.ndarray) -> None:
        """Blocks int32[G, n] in int64[n] columns of rows, one row's next to each other, have object[n] hashes now.

        States up to the row's longest checkpoint stay anyway, so they need not be told.
        """
        if any_true(self._is_added[rows]):
            self._note_added()
        self._added.append((rows, columns, ids, hashes))
        self._is_added[rows] = True

    def new_step_starts(self) -> None:
        """Forgets what the last steps superseded."""
        self._num_steps += 1
        if self._num_steps % STEPS:
            return
        self._note_added()
        if self._superseded:
            ids, hashes = zip(*self._superseded, strict=True)
            self._superseded.clear()
            self._pool.forget_doubtful(np.concatenate(ids, axis=1), np.concatenate(hashes))

    def _note_added(self) -> None:
        """What was added last of each row is the row's newest state, and supersedes its oldest one."""
        if not self._added:
            return
        rows, columns, ids, hashes = self._newest_added()
        self._is_added[rows] = False
        self._note_superseded(rows)
        for each in (self._ids, self._hashes, self._lengths):
            each[1:, ..., rows] = each[:-1, ..., rows]
        self._ids[0][:, rows], self._hashes[0, rows] = ids, hashes
        self._lengths[0, rows] = (columns + 1) * self._block_size

    def _newest_added(self) -> Added:
        """The last state of each row that has some, which are added no more."""
        rows, columns, ids, hashes = [np.concatenate(parts, axis=-1) for parts in zip(*self._added, strict=True)]
        self._added.clear()
        is_last = np.append(rows[1:] != rows[:-1], True)
        return rows[is_last], columns[is_last], ids[:, is_last], hashes[is_last]

    def _note_superseded(self, rows: np.ndarray) -> None:
        """The oldest state of each row is to be forgotten, if it is behind the row's checkpoints and no interval's."""
        lengths, interval = self._lengths[-1, rows], self._retention.interval
        is_superseded = lengths > self._retention.longest[rows]
        if interval:
            is_superseded &= lengths % interval != 0
        if any_true(is_superseded):
            rows = rows[is_superseded]
            self._superseded.append((self._ids[-1][:, rows], self._hashes[-1, rows]))


__all__ = ["STEPS", "AnswerStates"]
