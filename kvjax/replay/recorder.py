"""What a replay measures while it runs: hits, host time per step, occupancy over time, latencies.

Flow:    simulators -> [Recorder] -> ReplayResult
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvjax.core.pool.block_pool import BlockPool

MAX_SAMPLES = 500


@dataclass(frozen=True, slots=True)
class Sample:
    """State at one moment. Blocks are counted over all pools, null blocks excepted."""

    time_s: float  # virtual
    held_blocks: int
    cached_blocks: int  # free, but a lookup can still hit them
    running: int
    waiting: int
    prompt_tokens: int  # from here on: totals so far
    hit_tokens: int
    infinite_hit_tokens: int
    preemptions: int


@dataclass
class Recorder:
    """Counters of one replay, owned by the simulator that runs it.

    Maxima are over all steps; samples get sparser by halves, so that a long replay keeps fewer than MAX_SAMPLES.
    """

    pools: tuple[BlockPool, ...]
    block_size: int
    on_decision: Callable[[], object] = lambda: None  # called when a request is admitted first, or refused instead
    requests: int = 0  # admitted
    refused: int = 0  # larger than the cache
    prompt_tokens: int = 0
    prompt_blocks: int = 0
    output_tokens: int = 0
    hit_tokens: int = 0
    infinite_hit_tokens: int = 0
    hits: list[tuple[int, int]] = field(default_factory=list)  # prompt and hit tokens of each request as admitted first
    computed_tokens: int = 0
    preemptions: int = 0
    max_held_blocks: int = 0
    max_running: int = 0
    max_waiting: int = 0
    host_ns: list[int] = field(default_factory=list)  # CPU time of scheduler and managers per step
    ttft_s: list[float] = field(default_factory=list)  # arrival to first token, virtual
    second_token_s: list[float] = field(default_factory=list)  # arrival to second token, virtual
    token_gap_s: list[float] = field(default_factory=list)  # first to last token over the gaps between, of each request
    latency_s: list[float] = field(default_factory=list)  # arrival to last token, virtual
    busy_s: float = 0.0  # in steps, virtual
    samples: list[Sample] = field(default_factory=list)
    _stride: int = 1

    def count_admission(self, prompt_tokens: int, hit_tokens: int, infinite_hit_tokens: int) -> None:
        """Adds a request that got its blocks for the first time, and what this and an infinite cache hit."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.prompt_blocks += prompt_tokens // self.block_size
        self.hit_tokens += hit_tokens
        self.infinite_hit_tokens += infinite_hit_tokens
        self.hits.append((prompt_tokens, hit_tokens))
        self.on_decision()

    def count_refusal(self) -> None:
        """Adds a request that is larger than the cache."""
        self.refused += 1
        self.on_decision()

    def sample(self, time_s: float, running: int, waiting: int) -> None:
        """Notes the state after a step: the maxima always, the rest for one step in `_stride`."""
        held = sum(pool.num_blocks - 1 - pool.num_free_blocks for pool in self.pools)
        self.max_held_blocks = max(self.max_held_blocks, held)
        self.max_running, self.max_waiting = max(self.max_running, running), max(self.max_waiting, waiting)
        if len(self.host_ns) % self._stride:
            return
        cached = sum(pool.num_cached_free_blocks for pool in self.pools)
        totals = (self.prompt_tokens, self.hit_tokens, self.infinite_hit_tokens, self.preemptions)
        self.samples.append(Sample(time_s, held, cached, running, waiting, *totals))
        if len(self.samples) >= MAX_SAMPLES:
            del self.samples[1::2]
            self._stride *= 2
