"""Drafts that one step verifies: where each comes from, and which rows of logits judge them.

Flow:    a drafter's tokens -> [StepDrafts] -> build_step_plan -> token ids, sources and rows of logits of the StepPlan
Source:  ARCHITECTURE.md, "The step plan"

A request with k drafts computes its newest token and the drafts behind it in one step, and has 1 + k rows of logits.
Row 0 predicts what follows the newest token, row j what follows draft j. Draft j + 1 is accepted if all drafts before
it are, and if row j samples it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class StepDrafts:
    """The drafts of the step's requests, in scheduling order; the step's new tokens include them, as the last ones."""

    counts: np.ndarray  # int[S] drafts of each request, at most k; 0: none
    token_ids: np.ndarray  # int[S, k] ids in [0, 2**31); those behind a request's count mean nothing
    source: np.ndarray | None = None  # int[S, k] -1: `token_ids` has it, else where `previous` on the device does

    def in_order(self, order: np.ndarray | slice) -> StepDrafts:
        """The same of requests in another order."""
        source = None if self.source is None else self.source[order]
        return StepDrafts(self.counts[order], self.token_ids[order], source)

    def check_drafts(self, rows: np.ndarray, num_new: np.ndarray) -> None:
        """Checks the drafts of int64[S] rows with int64[S] new tokens.

        Raises:
            ValueError: shapes differ, a count is negative, beyond k or leaves no token to start from, or a draft that
                the host has is no token id.
        """
        counts, ids = np.asarray(self.counts), np.asarray(self.token_ids)
        if counts.shape != rows.shape or ids.ndim != 2 or ids.shape[0] != rows.size:
            raise ValueError(
                f"expected drafts of {rows.size} requests, counts [S] and token_ids [S, k], got "
                f"{list(counts.shape)} and {list(ids.shape)}"
            )
        if self.source is not None and self.source.shape != ids.shape:
            raise ValueError(f"expected sources of drafts {list(ids.shape)}, got {list(self.source.shape)}")
        bad = (counts < 0) | (counts > ids.shape[1])
        if bad.any():
            i = int(bad.argmax())
            raise ValueError(f"row {rows[i]}: expected 0 to {ids.shape[1]} drafts, got {counts[i]}")
        if (counts >= num_new).any():
            i = int((counts >= num_new).argmax())
            raise ValueError(
                f"row {rows[i]}: expected more new tokens than the {counts[i]} drafts among them, got {num_new[i]}"
            )
        host_ids = ids[self._is_draft if self.source is None else self._is_draft & (self.source < 0)]
        if host_ids.size and (host_ids.min() < 0 or host_ids.max() >= 2**31):
            raise ValueError(f"expected drafts in [0, 2**31), got {host_ids.min()} to {host_ids.max()}")

    def put(
        self,
        ends: np.ndarray,  # int64[S] last new token of each request
        token_ids: np.ndarray,  # int[T], written
        token_source: np.ndarray,  # int32[T], written
    ) -> None:
        """Writes the drafts over the last tokens of their requests."""
        is_draft = self._is_draft
        first = ends - self.counts + 1
        places = (first[:, None] + np.arange(is_draft.shape[1]))[is_draft]
        ids = self.token_ids[is_draft]
        if self.source is not None:
            source = self.source[is_draft]
            token_source[places] = source
            ids = np.where(source < 0, ids, 0)
        token_ids[places] = ids

    def logits_rows(self, ends: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(int32[N] tokens whose logits are wanted, int32[S' + 1] where those of each wanted request begin).

        Args:
            ends: int64[S] last new token of each request.
            wanted: bool[S] whose logits are wanted.
        """
        counts = self.counts[wanted]
        starts = np.zeros(counts.size + 1, np.int64)
        np.cumsum(1 + counts, out=starts[1:])
        first = ends[wanted] - counts
        indices = np.arange(starts[-1]) + np.repeat(first - starts[:-1], 1 + counts)
        return indices.astype(np.int32), starts.astype(np.int32)

    @property
    def _is_draft(self) -> np.ndarray:  # bool[S, k]
        """Which entries are drafts."""
        return np.arange(self.token_ids.shape[1]) < self.counts[:, None]


__all__ = ["StepDrafts"]
