"""A word in before the process aborts: C++ that ends it by SIGABRT calls Python first, in the thread that aborts.

Flow:    abort() in a thread of C++ -> [AbortTrap] -> a Python function, which may end the process in its own way
Source:  jax's coordination client aborts its process when the coordinator is gone, and asks nobody

Python's own signal handlers run in the main thread, later; by then the process is gone. This one is a C function, so it
runs at once. That is safe for a signal that a thread sends to itself by `abort`, and for no other.
"""

from __future__ import annotations

import ctypes
import functools
import signal
import sys
from collections.abc import Callable
from typing import Any

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)


class AbortTrap:
    """One for a process; lives as long as it does."""

    def __init__(self, on_abort: Callable[[], object]) -> None:
        """`on_abort` is called in any thread. If it returns, the abort goes on as it would have."""
        self._on_abort = on_abort
        self._handler = _Handler(self._run)
        self._before: int | None = None  # address of the handler that was there

    def arm(self) -> None:
        """Puts the trap before whatever handler there is now; another call does so again. Does nothing on Windows."""
        if sys.platform == "win32":
            return
        own = ctypes.cast(self._handler, ctypes.c_void_p).value
        before = _c().signal(signal.SIGABRT, own)
        if before != own:
            self._before = before

    def _run(self, number: int) -> None:
        self._on_abort()
        _c().signal(number, self._before)
        getattr(_c(), "raise")(number)


@functools.cache
def _c() -> Any:
    """The C library, as far as it is called here."""
    library = ctypes.CDLL(None)
    library.signal.restype, library.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    return library


__all__ = ["AbortTrap"]
