"""Whether the drafts of a step are worth it: a step with a few drafts may cost as much as one with many.

Flow:    what became of earlier drafts -> [DraftGate] -> all drafts of the next step, or none

Where products are bound by arithmetic, as on a CPU, a step costs what its padded tokens cost, and one row's draft pads
all rows. So a step takes drafts if those that it may expect to be right are enough for the rows that decode in it.

A row's rate is the share of its drafts that were right, half of it that of the last step. It starts at a half, and goes
back there, by half the way in `FORGETS` tokens: a row that was refused is tried again.
"""

from __future__ import annotations

import numpy as np

FIRST_RATE = 0.5
FORGETS = 32  # tokens


class DraftGate:
    """The rates of one request table's rows. Calls cost a few numpy calls over the rows asked about."""

    def __init__(self, least_gain: float) -> None:
        """`least_gain`: right drafts to be expected for each row that decodes in a step with drafts; 0: always open."""
        self._least_gain = least_gain
        self._rates = np.zeros(0)  # of each row when its drafts were last settled
        self._rated_at = np.zeros(0, np.int64)  # tokens that it had then

    def reserve(self, num_rows: int) -> None:
        """Room for rows of the table."""
        new = num_rows - self._rates.size
        self._rates = np.append(self._rates, np.full(new, FIRST_RATE))
        self._rated_at = np.append(self._rated_at, np.zeros(new, np.int64))

    def start(self, row: int) -> None:
        """Another request has the row."""
        self._rates[row] = FIRST_RATE

    def settle(
        self,
        rows: np.ndarray,  # int64[n]
        num_tokens: np.ndarray,  # int64[n] of each
        num_drafts: np.ndarray,  # int64[n] >= 1
        num_accepted: np.ndarray,  # int64[n] of them
    ) -> None:
        """A step with drafts is read."""
        self._rates[rows] = (self._rates_now(rows, num_tokens) + num_accepted / num_drafts) / 2
        self._rated_at[rows] = num_tokens

    def opened(
        self,
        rows: np.ndarray,  # int64[n] that decode
        num_tokens: np.ndarray,  # int64[n] of each
        counts: np.ndarray,  # int64[n] drafts that each could have
    ) -> np.ndarray:  # int64[n]
        """`counts`, or zeros where too few of them may be expected to be right."""
        if not self._least_gain or not counts.any():
            return counts
        rates = np.minimum(self._rates_now(rows, num_tokens), 1 - 1e-9)
        expected = rates * (1 - rates**counts) / (1 - rates)  # a draft is right only behind right ones
        return counts if expected.sum() >= self._least_gain * rows.size else np.zeros_like(counts)

    def _rates_now(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:  # float64[n]
        away = self._rates[rows] - FIRST_RATE
        return FIRST_RATE + away * 0.5 ** ((num_tokens - self._rated_at[rows]) / FORGETS)


__all__ = ["FIRST_RATE", "FORGETS", "DraftGate"]
