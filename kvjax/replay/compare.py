"""What a cache hits as configured, and what that is measured against: one cell of a table over models and sizes.

Flow:    trace, ReplayConfig of a model and a size -> [replay_hits, bound_hits, infinite_hits] -> hit tokens by column

    serial           as configured, one prompt after another
    batches          the same in continuous batching
    vLLM's rules     as `serial`, by the exact rules of the newest release of vLLM, on the same blocks
    free exchange    bytes exchanged freely under LRU; `unforgetting`: were checkpoints free
    clairvoyant      bytes exchanged freely by who knows the trace
    infinite cache   nothing is ever evicted, whatever the size; hits are whole blocks, as a cache's own
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from kvjax.core.options.release_rules import RELEASES
from kvjax.replay.bounds import find_bounds
from kvjax.replay.bounds.infinite_cache import InfiniteCache
from kvjax.replay.replay import ReplayConfig, plan_cache, run_replay
from kvjax.replay.requests.trace import TraceRequest

SERIAL, BATCHES, VLLM_RULES = "serial", "batches", "vLLM's rules"
FREE_EXCHANGE, UNFORGETTING, CLAIRVOYANT = "free exchange", "unforgetting", "clairvoyant"
INFINITE = "infinite cache"
BOUNDS = (FREE_EXCHANGE, UNFORGETTING, CLAIRVOYANT)
RUNS: Mapping[str, Callable[[ReplayConfig], ReplayConfig]] = MappingProxyType(
    {
        SERIAL: lambda config: replace(config, serial=True),
        BATCHES: lambda config: replace(config, serial=False),
        VLLM_RULES: lambda config: replace(config, serial=True, release=list(RELEASES)[-1]),
    }
)


def replay_hits(
    run: str,
    trace: Sequence[TraceRequest],
    config: ReplayConfig,
    on_progress: Callable[[int], object],
    should_stop: Callable[[], bool],
) -> dict[str, int] | None:
    """Hit tokens of one of `RUNS`, by its name; None: it was to stop before the end.

    Raises:
        MemoryBudgetError: the memory does not hold the cache of the longest request.
    """
    result = run_replay(trace, RUNS[run](config), on_progress, should_stop=should_stop)
    return {run: result.recorder.hit_tokens} if result.is_complete else None


def bound_hits(trace: Sequence[TraceRequest], config: ReplayConfig) -> dict[str, int]:
    """Hit tokens of the bounds, by their names.

    Raises:
        MemoryBudgetError: the memory does not hold the cache of the longest request.
    """
    config = RUNS[SERIAL](config)
    plan = plan_cache(trace, config)
    bounds = find_bounds(trace, plan, config.hash_block_size)
    return {
        FREE_EXCHANGE: bounds.free_exchange,
        UNFORGETTING: bounds.free_exchange_unforgetting,
        CLAIRVOYANT: bounds.clairvoyant,
    }


def infinite_hits(trace: Sequence[TraceRequest], config: ReplayConfig) -> dict[str, int]:
    """Hit tokens of a cache that never evicts, by its name."""
    cache = InfiniteCache(config.block_size)
    return {INFINITE: sum(map(cache.lookup_and_add, trace))}


__all__ = [
    "BATCHES",
    "BOUNDS",
    "FREE_EXCHANGE",
    "INFINITE",
    "RUNS",
    "SERIAL",
    "bound_hits",
    "infinite_hits",
    "replay_hits",
]
