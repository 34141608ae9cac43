"""One step of the scheduler as values: what is computed, and which tokens came of it.

Flow:    Scheduler.schedule -> [NextStep] -> [ScheduledStep] -> model -> Scheduler.update -> [NewTokens]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kvjax.core import PrefixCacheStats
from kvjax.engine.requests.engine_request import EngineRequest


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
    lookups: PrefixCacheStats  # of the requests admitted in this step; `preempted_*` are of those admitted before
    num_released: tuple[int, ...]  # per pool: blocks that running requests released
    num_drafts: np.ndarray | None = None  # int64[S] how many of the new tokens are drafts; None: none of any

    @cached_property
    def all_sample(self) -> bool:
        """Whether every request samples."""
        return np.count_nonzero(self.samples) == self.samples.size

    def logits_rows(self) -> np.ndarray:  # int64[S']
        """Rows of logits of each request that samples: one, and one for each draft."""
        if self.num_drafts is None:
            return np.ones(int(np.count_nonzero(self.samples)), np.int64)
        return 1 + self.num_drafts[self.samples]

    def sampled_places(self, num_computed_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(int64[N] row of the request table, int64[N] place of the token to sample) of each row of logits.

        Args:
            num_computed_tokens: int[S] tokens of each request before the step.
        """
        rows, places = self.rows, num_computed_tokens + self.num_new_tokens
        if not self.all_sample:
            rows, places = rows[self.samples], places[self.samples]
        if self.num_drafts is None:
            return rows, places
        counts = self.logits_rows()
        back = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(int(counts.sum()))  # drafts behind each
        return np.repeat(rows, counts), np.repeat(places, counts) - back


@dataclass(frozen=True)
class NewTokens:
    """The tokens that requests got in one step, in the step's order; several of one request stand side by side."""

    requests: np.ndarray  # object[n] EngineRequest
    request_ids: np.ndarray  # object[n] text
    token_ids: np.ndarray  # int32[n]
    logprobs: np.ndarray  # float32[n]
    first: tuple[int, ...]  # places of tokens that are their request's first
    ended: tuple[int, ...]  # places of tokens that end their request
    looked_at: tuple[int, ...]  # places of tokens that their request was shown: all that it follows
    logits_rows: np.ndarray  # int64[n] rows of the step's logits
    num_accepted: int = 0  # tokens that were drafts


@dataclass
class NextStep:
    """A step while it is being scheduled."""

    budget: int  # tokens left
    rows: list[np.ndarray] = field(default_factory=list)  # int64[...] each
    num_new_tokens: list[np.ndarray] = field(default_factory=list)  # int64[...] each
    samples: list[np.ndarray] = field(default_factory=list)  # bool[...] each
    admitted: list[EngineRequest] = field(default_factory=list)
    lookups: PrefixCacheStats = field(default_factory=PrefixCacheStats)

    def take(
        self,
        rows: np.ndarray,  # int64[n]
        num_new_tokens: np.ndarray,  # int64[n]
        num_left: np.ndarray,  # int64[n] tokens until the next is sampled
        num_tokens: int,  # sum of the new tokens
    ) -> None:
        """Adds requests to the step."""
        self.rows.append(rows)
        self.num_new_tokens.append(num_new_tokens)
        self.samples.append(num_new_tokens == num_left)
        self.budget -= num_tokens

    def admit(self, engine_request: EngineRequest, num_found_tokens: int) -> None:
        """Counts a request that is about to run from behind the tokens that were found of it."""
        self.admitted.append(engine_request)
        was_admitted = engine_request.stats.num_cached_tokens is not None
        self.lookups.record(engine_request.request.num_tokens, num_found_tokens, was_admitted)

    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, new tokens and whether they sample, in the order in which they were taken."""
        return _joined(self.rows), _joined(self.num_new_tokens), _joined(self.samples)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
