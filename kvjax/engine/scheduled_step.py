"""One step of the scheduler as values: what is computed, and which tokens came of it.

Flow:    Scheduler.schedule -> [NextStep] -> [ScheduledStep] -> model -> Scheduler.update -> [NewTokens]
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvjax.engine.engine_request import EngineRequest


@dataclass(frozen=True)
class ScheduledStep:
    """One step, and what it took to schedule it. Requests with one new token come first, as in a `StepPlan`."""

    requests: np.ndarray  # object[S] EngineRequest
    request_ids: np.ndarray  # object[S] text
    rows: np.ndarray  # int64[S]
    num_new_tokens: np.ndarray  # int64[S] >= 1
    samples: np.ndarray  # bool[S] whether the request's last token is computed here, so that the next is sampled
    token_source: (
        np.ndarray | None
    )  # int32[S] -1: known, else index into the tokens sampled a step before; None: all -1
    admitted: tuple[EngineRequest, ...]
    num_preemptions: int
    num_queried_tokens: int  # tokens of the requests admitted in this step
    num_hit_tokens: int  # those of them that the prefix cache held
    num_released: tuple[int, ...]  # per pool: blocks that running requests released


@dataclass(frozen=True)
class NewTokens:
    """The tokens that requests got in one step, in the step's order."""

    requests: np.ndarray  # object[n] EngineRequest
    request_ids: np.ndarray  # object[n] text
    token_ids: np.ndarray  # int32[n]
    logprobs: np.ndarray  # float32[n]
    first: tuple[int, ...]  # places of those that are their request's first
    ended: tuple[int, ...]  # places of those that end their request
    looked_at: tuple[int, ...]  # places of those that were shown to their request: all of those that are followed
    logits_rows: np.ndarray  # int64[n] rows of the step's logits


@dataclass
class NextStep:
    """A step while it is being scheduled."""

    budget: int  # tokens left
    rows: list[np.ndarray] = field(default_factory=list)  # int64[...] each
    num_new_tokens: list[np.ndarray] = field(default_factory=list)  # int64[...] each
    samples: list[np.ndarray] = field(default_factory=list)  # bool[...] each
    admitted: list[EngineRequest] = field(default_factory=list)
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0

    def take(
        self,
        rows: np.ndarray,  # int64[n]
        num_new_tokens: np.ndarray,  # int64[n]
        num_left: np.ndarray,  # int64[n] tokens until the next is sampled
    ) -> None:
        """Adds requests to the step."""
        self.rows.append(rows)
        self.num_new_tokens.append(num_new_tokens)
        self.samples.append(num_new_tokens == num_left)
        self.budget -= int(num_new_tokens.sum())

    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, new tokens and whether they sample, those of one new token first."""
        columns = (_joined(self.rows), _joined(self.num_new_tokens), _joined(self.samples))
        is_longer = columns[1] != 1
        if not is_longer.any():
            return columns
        order = np.argsort(is_longer, kind="stable")
        return columns[0][order], columns[1][order], columns[2][order]


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
