"""An interrupt (Ctrl-C) that ends long work between two of its steps, so that what is done so far can be reported.

Flow:    SIGINT -> [interruptible] -> should_stop() of the work -> report of what is done, exit status 130
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # exit status: 128 and the number of SIGINT, as shells have it


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """What says whether an interrupt has come during the block; the second one raises KeyboardInterrupt.

    Where interrupts are not for Python's own handler to take, as in threads other than the main one, it stays as it is.
    """
    has_come = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        if has_come:
            raise KeyboardInterrupt
        has_come = True

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield lambda: False
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: has_come
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
