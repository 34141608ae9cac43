"""Counts the programs that XLA compiles, to show that a run after warm-up compiles none.

Flow:    jax.monitoring events -> [count_compilations] -> CompileCount.num_programs
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclass
class CompileCount:
    """Programs compiled in this process while a `count_compilations` block ran; it grows until the block ends."""

    num_programs: int = 0


@contextmanager
def count_compilations() -> Iterator[CompileCount]:
    """Counts every compilation of the process inside the block, op by op ones included."""
    count = CompileCount()

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        count.num_programs += event == _COMPILE_EVENT

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
