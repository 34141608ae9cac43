"""Replay of one request at a time: look up, allocate the whole prompt, free. Nothing runs beside anything else.

Flow:    trace -> [replay_serial] -> KVCacheManager calls -> Recorder

It is the measure of a cache by itself: hits depend on the trace's order and the pool's size only. Virtual time is the
trace's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import thread_time_ns

from kvjax.core.kv_cache_manager import KVCacheManager
from kvjax.replay.clock import VirtualClock
from kvjax.replay.infinite_cache import InfiniteCache
from kvjax.replay.prompts import PromptMaker
from kvjax.replay.recorder import Recorder
from kvjax.replay.trace import TraceRequest


def replay_serial(
    trace: Sequence[TraceRequest],
    manager: KVCacheManager,
    prompts: PromptMaker,
    infinite: InfiniteCache,
    recorder: Recorder,
    clock: VirtualClock,
    on_progress: Callable[[int], object],
) -> None:
    """Feeds the trace; a request larger than the pool is counted as refused and leaves no trace in the cache."""
    for index, source in enumerate(trace):
        clock.now_s = source.timestamp_ms / 1e3
        infinite_hit = infinite.lookup_and_add(source)
        request = prompts.make(str(index), source)
        start = thread_time_ns()
        blocks, hit = manager.get_computed_blocks(request)
        allocated = manager.allocate_slots(request, source.input_length - hit, hit, blocks)
        spent = thread_time_ns() - start
        if allocated is None:
            recorder.refused += 1
        else:
            recorder.count_admission(source.input_length, hit, infinite_hit)
            recorder.computed_tokens += source.input_length - hit
            recorder.sample(clock.now_s, running=1, waiting=0)
            start = thread_time_ns()
            manager.free(request)
            spent += thread_time_ns() - start
        recorder.host_ns.append(spent)
        on_progress(1)
