"""`kvjax replay --calls FILE`: makes recorded calls again and says whether every answer is as recorded.

Flow:    FILE of `kvjax replay --record` or a CallRecorder -> [make_calls] -> counts, the manager in words
"""

from __future__ import annotations

from time import perf_counter

from kvjax.cli.running.interrupts import INTERRUPTED, interruptible
from kvjax.cli.running.progress import progress
from kvjax.core.record.call_replay import replay_calls


def make_calls(path: str, with_progress: bool) -> int:
    """Replays the file, or as much of it as an interrupt lets, and prints what was called; 0, or that one came.

    Raises:
        CallLogError: no file of calls, a damaged one, or an answer that differs.
        OSError: the file cannot be read.
    """
    start = perf_counter()
    with interruptible() as should_stop, progress("Replaying", None, "call", enabled=with_progress) as advance:
        replayed = replay_calls(path, lambda manager: advance(1), should_stop)
    counts = ", ".join(f"{count:,} {name}" for name, count in sorted(replayed.num_calls.items()))
    seconds = perf_counter() - start
    if not replayed.is_complete:
        print("interrupted; until then:")
    print(f"{sum(replayed.num_calls.values()):,} calls in {seconds:.1f} s, every answer as recorded: {counts}")
    print(replayed.manager.describe())
    return 0 if replayed.is_complete else INTERRUPTED
