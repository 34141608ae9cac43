"""Replay of one request at a time: look up, allocate the whole prompt, free. Nothing runs beside anything else.

Flow:    trace -> [replay_serial] -> KVCacheManager calls -> Recorder

It is the measure of a cache by itself: hits depend on the trace's order and the pool's size only. Virtual time is the
trace's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import thread_time_ns

from kvjax.core.manager.kv_cache_manager import KVCacheManager
from kvjax.core.pool.kv_cache_blocks import KVCacheBlocks
from kvjax.core.requests.request import Request
from kvjax.replay.beyond.tiers import ReplayTiers
from kvjax.replay.bounds.infinite_cache import InfiniteCache
from kvjax.replay.recorder import Recorder
from kvjax.replay.requests.prompts import PromptMaker
from kvjax.replay.requests.trace import TraceRequest
from kvjax.replay.virtual_time.clock import VirtualClock


def replay_serial(
    trace: Sequence[TraceRequest],
    manager: KVCacheManager,
    prompts: PromptMaker,
    infinite: InfiniteCache,
    recorder: Recorder,
    clock: VirtualClock,
    on_progress: Callable[[int], object],
    should_stop: Callable[[], bool],
    tiers: ReplayTiers | None = None,
) -> None:
    """Feeds the trace, as far as it is not to stop.

    A request larger than the pool is counted as refused and leaves no trace in the cache. What lies in tiers is loaded
    at once: time passes with the trace alone.
    """
    for index, source in enumerate(trace):
        if should_stop():
            return
        clock.now_s = source.timestamp_ms / 1e3
        infinite_hit = infinite.lookup_and_add(source)
        request = prompts.make(str(index), source)
        start = thread_time_ns()
        manager.new_step_starts()
        blocks, hit = manager.get_computed_blocks(request)
        if tiers is not None:
            hit += _load(manager, request, hit, blocks, tiers)
        fits = _compute(manager, request, hit, blocks)
        if tiers is not None:
            tiers.step_is_planned()
            tiers.step_starts()
        spent = thread_time_ns() - start
        if not fits:
            recorder.count_refusal()
        else:
            recorder.count_admission(source.input_length, hit, infinite_hit)
            recorder.computed_tokens += source.input_length - hit
            recorder.sample(clock.now_s, running=1, waiting=0)
            start = thread_time_ns()
            manager.free(request)
            spent += thread_time_ns() - start
        recorder.host_ns.append(spent)
        on_progress(1)


def _load(manager: KVCacheManager, request: Request, hit: int, blocks: KVCacheBlocks, tiers: ReplayTiers) -> int:
    """Loads what lies behind a hit; its tokens. The request has a row then, with these tokens computed."""
    external, _ = tiers.connector.get_num_new_matched_tokens(request, blocks, hit)
    if not external or not _allocate_external(manager, request, hit, blocks, external):
        return 0
    request.num_computed_tokens = hit + external
    tiers.connector.update_state_after_alloc(request, blocks, external)
    tiers.step_is_planned()
    tiers.step_starts()
    manager.cache_blocks(request, hit + external)
    return external


def _allocate_external(
    manager: KVCacheManager, request: Request, hit: int, blocks: KVCacheBlocks, num_tokens: int
) -> bool:
    """Blocks for a hit and the external tokens behind it, which are no hits of others yet; False: they do not fit."""
    allocated = manager.allocate_slots(
        request,
        0,
        hit,
        blocks,
        num_external_computed_tokens=num_tokens,
        delay_cache_blocks=True,
        full_sequence_must_fit=True,
    )
    return allocated is not None


def _compute(manager: KVCacheManager, request: Request, hit: int, blocks: KVCacheBlocks) -> bool:
    """Computes the prompt behind its hit, in one step unless states have to be cached on the way.

    False if it does not fit, when the request holds nothing.
    """
    if request.row < 0:
        step = manager.limit_step(request, request.num_tokens - hit, hit, blocks)
        if manager.allocate_slots(request, step, hit, blocks) is None:
            return False
        request.num_computed_tokens = hit + step
    while left := request.num_tokens - request.num_computed_tokens:
        step = manager.limit_step(request, left)
        if manager.allocate_slots(request, step) is None:
            manager.free(request)
            return False
        request.num_computed_tokens += step
    return True
