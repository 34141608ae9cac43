"""Python's garbage collection, put off while a replay makes millions of objects that are no garbage.

Flow:    reading a trace, a replay -> [no_garbage_collection] -> as before
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For the block: neither readers nor the core make cycles, and collecting the oldest generation is slow."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


__all__ = ["no_garbage_collection"]
