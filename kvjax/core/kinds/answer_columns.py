"""Which table columns a row of recurrent states uses, where those of an answer are registered at few lengths.

Flow:    RecurrentManager -> [AnswerColumns] -> columns of rows, and which of them are registered

Up to a row's longest checkpoint every column may hold a state, and one that filled is registered. Behind it a state is
registered every `unit` tokens, and the row passes over the columns between.

Every rule takes the numbers of one row as ints, or those of many rows as int64[n].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvjax.core.kinds.retention import Retention
from kvjax.core.spec import cdiv
from kvjax.core.tables.ints_or_arrays import IntOrArray, at_least, at_most, choose

ANSWER_TOKENS = 64
NONE_AHEAD = 0  # as `longest`


@dataclass(frozen=True)
class AnswerColumns:
    """The columns of one manager. `longest` is `longest_of` the rows, looked up once for all rules."""

    retention: Retention
    block_size: int  # tokens of a column
    unit: int  # tokens, a multiple of `block_size`
    most_columns: int  # of a row

    @classmethod
    def of(cls, retention: Retention, block_size: int, max_model_len: int) -> AnswerColumns:
        """A unit is `ANSWER_TOKENS`, or the interval if that is shorter."""
        unit = cdiv(ANSWER_TOKENS, retention.alignment) * retention.alignment
        unit = min(unit, retention.interval) if retention.interval else unit
        return cls(retention, block_size, unit, cdiv(max_model_len, block_size))

    def longest_of(self, row: IntOrArray) -> IntOrArray:
        """Tokens of the longest checkpoint of a row, or of each of int64[n] rows."""
        longest = self.retention.longest
        return longest.item(row) if isinstance(row, int) else longest[row]

    def longest_ahead(
        self, rows: np.ndarray, num_slots: np.ndarray, num_columns: np.ndarray
    ) -> np.ndarray | int:  # int64[n]
        """`longest_of` rows with int64[n] slots and registered columns; `NONE_AHEAD` if all are behind it."""
        longest = self.retention.longest[rows]
        is_behind = np.minimum(num_slots - 1, num_columns * self.block_size) >= longest
        return NONE_AHEAD if np.logical_and.reduce(is_behind) else longest

    def end(self, longest: int | IntOrArray, num_tokens: IntOrArray) -> IntOrArray:
        """How many columns end where the one of the state after `num_tokens` tokens does."""
        size, unit = self.block_size, self.unit
        behind = at_most((num_tokens + (unit - 1)) // unit * (unit // size), self.most_columns)
        if longest is NONE_AHEAD:
            return behind
        return choose(num_tokens <= longest, (num_tokens + (size - 1)) // size, behind)

    def full(self, longest: int | IntOrArray, num_tokens: IntOrArray) -> IntOrArray:
        """How many columns end at or before the last state to register of a row's first `num_tokens` tokens."""
        size, unit = self.block_size, self.unit
        behind = num_tokens // unit * (unit // size)
        if longest is NONE_AHEAD:
            return behind
        return at_most(at_least(behind, longest // size), num_tokens // size)

    def next_full(self, longest: int | IntOrArray, num_columns: IntOrArray) -> IntOrArray:
        """The fewest tokens that fill more than so many columns."""
        tokens, unit = num_columns * self.block_size, self.unit
        behind = tokens // unit * unit + unit
        return behind if longest is NONE_AHEAD else choose(tokens < longest, tokens + self.block_size, behind)


__all__ = ["ANSWER_TOKENS", "AnswerColumns"]
