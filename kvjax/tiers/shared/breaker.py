"""Leaves a store alone that does not answer, says so once, and comes back when it is well.

Flow:    SharedStore, how each call ended -> [Breaker.is_open] -> SharedStore, whether to call at all

    closed --MOST_FAILURES in a row--> open --a probe succeeds--> closed
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("kvjax.tiers")
MOST_FAILURES = 3  # in a row, of calls that began while it was closed


class Breaker:
    """One way of a store, up or down. Any thread may call it."""

    def __init__(
        self, what: str, on_change: Callable[[], object] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Closed.

        Args:
            what: way and store, for the log.
            on_change: is told when it opens or closes.
            clock: seconds that only grow.
        """
        self.problem = ""  # why it is open
        self._what = what
        self._on_change = on_change
        self._clock = clock
        self._guard = threading.Lock()
        self._num_failures = 0
        self._opened_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether nothing but a probe should be sent."""
        return self._opened_s is not None

    def succeed(self) -> None:
        """A call, or a probe, did what it should."""
        with self._guard:
            self._num_failures = 0
            opened_s, self._opened_s = self._opened_s, None
            self.problem = ""
        if opened_s is not None:
            self._on_change()
            logger.warning("%s works again, after %.1f s", self._what, self._clock() - opened_s)

    def fail(self, problem: object, *, is_first: bool = False) -> None:
        """A call did not; what opens the breaker is logged. One failure is enough where the store never worked."""
        with self._guard:
            self._num_failures = MOST_FAILURES if is_first else self._num_failures + 1
            opens = self._num_failures >= MOST_FAILURES and self._opened_s is None
            if opens:
                self._opened_s = self._clock()
                self.problem = f"{self._what}: {problem}"
        if opens:
            self._on_change()
            logger.error(
                "%s does not work and is left alone until it does; tokens are computed meanwhile: %s",
                self._what,
                problem,
            )


__all__ = ["MOST_FAILURES", "Breaker"]
