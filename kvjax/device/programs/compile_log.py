"""Writes to the logger `kvjax.device` that a step is compiled, for how long, and what came from the compilation cache.

Flow:    first call of a step's programs -> [log_compiling] -> INFO, a line before and a line behind
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvjax.device.programs.compile_counter import count_compilations

logger = logging.getLogger("kvjax.device")


@contextmanager
def log_compiling(what: str) -> Iterator[None]:
    """Around the call that compiles `what`; nothing where the level lets nothing through."""
    if not logger.isEnabledFor(logging.INFO):
        yield
        return
    logger.info("compiling %s", what)
    start = time.perf_counter()
    with count_compilations() as programs:
        yield
    num_compiled = programs.num_programs - programs.num_cached
    logger.info(
        "%s is ready after %.1f s: %d programs compiled, %d taken from the compilation cache",
        what,
        time.perf_counter() - start,
        num_compiled,
        programs.num_cached,
    )


__all__ = ["log_compiling"]
