"""Progress bars that interrupt the work they show, or tell when it is time to."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

ProgressFn = Callable[..., AbstractContextManager[Callable[[int], None]]]


def interrupting_after(num_units: int, title: str = "Replaying") -> ProgressFn:
    """Stands in for `progress` of a command: the process gets SIGINT once so many units of the named work are done."""
    return _calling_after(num_units, title, lambda: signal.raise_signal(signal.SIGINT))


def telling_after(num_units: int) -> ProgressFn:
    """The same, but for a line on stderr in place of the signal."""
    return _calling_after(num_units, "Replaying", lambda: print("replaying", file=sys.stderr, flush=True))


def _calling_after(num_units: int, of: str, call: Callable[[], object]) -> ProgressFn:
    @contextmanager
    def progress(title: str, total: int | None, unit: str, *, enabled: bool = True) -> Iterator[Callable[[int], None]]:
        num_done = 0

        def advance(count: int) -> None:
            nonlocal num_done
            if title == of and num_done < num_units <= num_done + count:
                call()
            num_done += count

        if title == of and not num_units:
            call()
        yield advance

    return progress
