"""What the engine writes to the logger `kvjax.engine`, and who else hears of its steps.

Flow:    EngineCore -> [EngineObserver] -> StepLog, kvjax.metrics.EngineMetrics

    INFO      an engine was made: what its cache holds
    WARNING   requests were preempted; the engine restarted after an exception
    DEBUG     each step, each request that ended

The logger `kvjax.device` says at INFO that a step is compiled, for how long, and what the compilation cache gave.

The library adds no handler. `logging.basicConfig(level=logging.INFO)` shows what an application wants to see.
"""

from __future__ import annotations

import logging
from typing import Protocol

from kvjax.engine.requests.outputs import GenerationResult, StepOutputs
from kvjax.engine.requests.stats import StepStats
from kvjax.engine.step.config import EngineConfig
from kvjax.planning import KVCachePlan

logger = logging.getLogger("kvjax.engine")


class EngineObserver(Protocol):
    """Hears of an engine's steps, on its thread. What it raises is logged, and changes nothing."""

    def step_ended(self, stats: StepStats, outputs: StepOutputs) -> object:
        """A step was read; the results of the requests that it ended are among the outputs."""

    def request_aborted(self, result: GenerationResult) -> object:
        """A request was aborted."""


class StepLog:
    """Writes of each step. Warns of preemptions when their number has doubled since the last warning."""

    def __init__(self) -> None:
        self._num_preemptions = 0
        self._num_at_next_warning = 1

    def step_ended(self, stats: StepStats, outputs: StepOutputs) -> None:
        """Writes what the level lets through; 1 us where that is nothing."""
        if stats.num_preemptions:
            self._warn(stats)
        if not logger.isEnabledFor(logging.DEBUG):
            return
        held = ", ".join(f"{pool.held} of {pool.held + pool.cached + pool.free}" for pool in stats.pools)
        logger.debug(
            "step %d: %d tokens of %d requests, %d sampled; %d run, %d wait, blocks held: %s",
            stats.step,
            stats.num_new_tokens,
            stats.num_requests,
            stats.num_sampled_tokens,
            stats.num_running,
            stats.num_waiting,
            held,
        )
        for result in outputs.results.values():
            _log_end(result)

    def request_aborted(self, result: GenerationResult) -> None:
        """Writes that at DEBUG."""
        _log_end(result)

    def _warn(self, stats: StepStats) -> None:
        self._num_preemptions += stats.num_preemptions
        if self._num_preemptions >= self._num_at_next_warning:
            self._num_at_next_warning = 2 * self._num_preemptions
            logger.warning(
                "step %d: the cache is full, and %d requests were preempted (%d so far); they compute their tokens "
                "again. More blocks (num_blocks, memory_bytes) or fewer requests at once (max_num_seqs) avoid that",
                stats.step,
                stats.num_preemptions,
                self._num_preemptions,
            )


def log_start(plan: KVCachePlan, config: EngineConfig) -> None:
    """Writes how large an engine's cache is."""
    blocks = ", ".join(str(pool.num_blocks) for pool in plan.pools)
    logger.info(
        "KV cache of %s blocks, %.1f MiB: %.1f requests of %d tokens at once; at most %d requests and %d tokens a step",
        blocks,
        plan.used_bytes / 2**20,
        plan.concurrency,
        plan.max_model_len,
        config.max_num_seqs,
        config.max_num_batched_tokens,
    )


def log_restart(error: BaseException, num_requests: int) -> None:
    """Writes that a call was broken off and undone."""
    logger.warning(
        "a call was broken off by %s: the cache is emptied, and %d requests start again with the tokens they have",
        repr(error),
        num_requests,
    )


def _log_end(result: GenerationResult) -> None:
    logger.debug(
        "request %s: %s after %d tokens", result.request_id, result.finish_reason.value, result.output_token_ids.size
    )


__all__ = ["EngineObserver", "StepLog", "log_restart", "log_start"]
