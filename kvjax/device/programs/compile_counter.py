"""Counts the programs that XLA makes ready, to show that a run after warm-up makes none.

Flow:    jax.monitoring events -> [count_compilations] -> CompileCount
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


@dataclass
class CompileCount:
    """Programs made ready in this process while a `count_compilations` block ran; it grows until the block ends."""

    num_programs: int = 0  # compiled, or taken from the persistent compilation cache
    num_cached: int = 0  # of them, taken from there


@contextmanager
def count_compilations() -> Iterator[CompileCount]:
    """Counts every compilation of the process inside the block, op by op ones included."""
    count = CompileCount()

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        count.num_programs += event == _COMPILE_EVENT

    def listen_for_hits(event: str, **kwargs: str | int) -> None:
        count.num_cached += event == _CACHE_HIT_EVENT

    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.monitoring.register_event_listener(listen_for_hits)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
        jax.monitoring.unregister_event_listener(listen_for_hits)
