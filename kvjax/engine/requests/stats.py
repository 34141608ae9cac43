"""What a request and a step cost: values for reports, tests and plots.

Flow:    Scheduler, LLMEngine -> [RequestStats, StepStats] -> kvjax.cli.commands.generate, or any monitoring

Times are seconds of a monotonic clock that the engine's owner may choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvjax.core import MissReason


@dataclass
class RequestStats:
    """One request's account."""

    request_id: str
    num_prompt_tokens: int
    arrival_time_s: float
    num_cached_tokens: int | None = None  # not computed at first admission: hit or shared; None: never admitted
    num_shared_tokens: int = 0  # cached tokens from the first sample of its prompt, without a lookup
    num_missed_tokens: Mapping[MissReason, int] | None = None  # by first admission; None: not explained, or shared
    num_computed_tokens: int = 0  # tokens that went through the model, recomputed ones included, rejected drafts not
    num_output_tokens: int = 0
    num_draft_tokens: int = 0  # verified, accepted or not
    num_accepted_tokens: int = 0  # drafts that became output: as many steps less
    num_preemptions: int = 0
    first_token_time_s: float | None = None
    finish_time_s: float | None = None

    @property
    def time_to_first_token_s(self) -> float | None:
        """From submission to the first token; None: there is none yet."""
        return None if self.first_token_time_s is None else self.first_token_time_s - self.arrival_time_s

    @property
    def output_tokens_per_s(self) -> float | None:
        """Speed after the first token; None: fewer than two tokens, or not finished."""
        if self.first_token_time_s is None or self.finish_time_s is None or self.num_output_tokens < 2:
            return None
        seconds = self.finish_time_s - self.first_token_time_s
        return (self.num_output_tokens - 1) / seconds if seconds > 0 else None


@dataclass(frozen=True)
class PoolUse:
    """Blocks of one pool at the end of a step, the null block left out: `held + cached + free` is the pool."""

    held: int  # used by requests
    cached: int  # free, but still a prefix-cache hit
    free: int  # free and empty
    released: int  # in this step, by requests that go on (blocks that left a sliding window)


@dataclass(frozen=True)
class StepStats:
    """One step of the engine."""

    step: int
    num_running: int
    num_waiting: int
    num_requests: int  # in the step
    num_new_tokens: int  # computed, drafts included
    num_sampled_tokens: int
    num_hit_tokens: int  # prompt tokens of requests first admitted in this step that were found cached
    num_queried_tokens: int  # prompt tokens of those requests
    num_preemptions: int
    host_us: float  # CPU time of scheduling, planning and bookkeeping, without the dispatch to the device
    pools: tuple[PoolUse, ...]
    num_draft_tokens: int = 0  # verified in this step
    num_accepted_tokens: int = 0  # drafts that became output, each of them a step less for its request
    num_refound_tokens: int = 0  # of requests admitted again, after a preemption or restart: what was still cached
    num_requeried_tokens: int = 0  # tokens of those requests, their output among them
