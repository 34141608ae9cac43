"""Speculative decoding: what callers choose, and what makes drafts.

Flow:    EngineConfig -> [SpeculativeConfig] -> [Drafter] -> Scheduler, HostLoop: drafts of a step -> settled
Source:  Leviathan et al., 2023; acceptance by shared noise: Daliri, Musco, Suresh, 2024 (arXiv:2408.07978)

A step computes a request's newest token and the drafts behind it, and samples at each of them as a step without
drafts would. The longest run of drafts that equals these samples is accepted, and one sample more comes behind it. What
a drafter says therefore changes how many tokens a step brings, never which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, get_args

import numpy as np

from kvjax.engine.requests.engine_request import EngineRequest
from kvjax.engine.sampling.sampling_table import SamplingTable

Method: TypeAlias = Literal["prompt_lookup", "draft_model"]
DEFAULT_MAX_NGRAM, DEFAULT_MIN_NGRAM = 4, 2


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How an engine drafts tokens.

    Args:
        method: "prompt_lookup" needs no model: drafts are what followed an earlier occurrence of a request's last
            tokens in its own prompt and output. "draft_model" asks a smaller model of the same vocabulary.
        num_drafts: most tokens of a request that a step drafts.
        max_ngram: most last tokens that are looked for; None: 4, or `min_ngram` where that is more.
        min_ngram: fewest; None: 2, or `max_ngram` where that is less.
        least_gain: right drafts that must be expected for each decoding request before a step drafts (`prompt_lookup`
            alone). Where a step costs by its tokens, as on a CPU, 0.3 is about what pays.

    Raises:
        ValueError: a value is outside its range, or n-grams or a gain are given for a draft model.
    """

    method: Method = "prompt_lookup"
    num_drafts: int = 4
    max_ngram: int | None = None
    min_ngram: int | None = None
    least_gain: float = 0.0

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise ValueError(f"expected method of {', '.join(get_args(Method))}, got {self.method!r}")
        if self.num_drafts < 1:
            raise ValueError(f"expected num_drafts >= 1, got {self.num_drafts}")
        if not 0 <= self.least_gain <= self.num_drafts:
            raise ValueError(f"expected least_gain in [0, num_drafts = {self.num_drafts}], got {self.least_gain}")
        if self.least_gain and self.method != "prompt_lookup":
            raise ValueError(f"expected no least_gain with method {self.method!r}, got {self.least_gain}")
        given = {"max_ngram": self.max_ngram, "min_ngram": self.min_ngram}
        for name, value in given.items():
            if value is None:
                continue
            if self.method != "prompt_lookup":
                raise ValueError(f"expected no {name} with method {self.method!r}: it looks nothing up, got {value}")
            if value < 1:
                raise ValueError(f"expected {name} >= 1, got {value}")
        longest, shortest = self.ngram_sizes
        if longest < shortest:
            raise ValueError(f"expected max_ngram >= min_ngram, got {longest} and {shortest}")

    @property
    def ngram_sizes(self) -> tuple[int, int]:
        """The most and the fewest tokens that are looked up."""
        longest, shortest = self.max_ngram, self.min_ngram
        if longest is None:
            longest = max(DEFAULT_MAX_NGRAM, shortest or 0)
        return longest, min(DEFAULT_MIN_NGRAM, longest) if shortest is None else shortest


class Drafts(NamedTuple):
    """Drafts of the requests of one step, in the order in which they were asked for; k columns."""

    token_ids: np.ndarray  # int32[S, k] of a request its count first; what is behind means nothing
    source: np.ndarray | None = None  # int32[S, k] -1: `token_ids` has it, else its index in `previous` on the device


class Drafter(Protocol):
    """Makes drafts for the requests of one host loop, on its thread.

    For each step, in this order: the scheduler asks `count` how many drafts there could be, and decides how many the
    step takes (fewer where tokens or blocks are short); the host loop asks `propose` for those, once; when the step is
    read and its tokens are appended, `settle` says what became of them. A request is in one step with drafts at a time.

    A request that is preempted stops, and starts again, maybe in another row. One that stops while its step is in
    flight is not settled.
    """

    def start(self, request: EngineRequest) -> None:
        """The request runs from here on, in the row `request.request.row`: admitted, forked, or back again."""

    def stop(self, request: EngineRequest) -> None:
        """It stops: ended, aborted or preempted. It still has its row and tokens."""

    def count(
        self,
        rows: np.ndarray,  # int64[n] that decode: all tokens but the newest are computed, and the host has all
        limits: np.ndarray,  # int64[n] >= 0, the most drafts that each can use
    ) -> np.ndarray:  # int64[n]
        """How many drafts there could be for each row in the next step, at most its limit."""

    def propose(
        self,
        rows: np.ndarray,  # int64[S] of the step, in scheduling order
        counts: np.ndarray,  # int64[S] drafts of each, at most what `count` said; 0 for all that it was not asked for
        sampling: SamplingTable,  # by row: how the requests sample, and with which seeds
    ) -> Drafts:
        """The step's drafts. Asked once a step, where any count is positive; blocks are allocated by then."""

    def settle(
        self,
        rows: np.ndarray,  # int64[n] that still run
        num_drafts: np.ndarray,  # int64[n] >= 1 drafts that each had
        num_accepted: np.ndarray,  # int64[n] of them
    ) -> None:
        """A step with drafts is read. The request table has the tokens that came of it."""

    @property
    def device_tokens(self) -> Any | None:
        """The newest `propose`'s drafts, int32 on the device, that follow a step's own tokens in `previous`.

        Their sources count from `Buckets.max_num_requests` on. None: the host has all drafts.
        """


__all__ = ["Drafter", "Drafts", "Method", "SpeculativeConfig"]
