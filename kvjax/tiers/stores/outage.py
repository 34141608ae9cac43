"""Whether a store keeps what it is given: an outage is told once when it begins, and once when it is over.

Flow:    each write of a store -> [Outage] -> log, TierStats.disk_problem -> metrics, `save_cache`

    well --failed--> out: an error is logged, and `disk_problem` says why
    out --worked, with no failure for `CALM_S`--> well: logged too

The calm keeps a store that takes every other unit, such as small ones on a full disk, from a message for each.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kvjax.tiers.stats import TierStats

CALM_S = 10.0  # without a failure, before an outage counts as over

logger = logging.getLogger(__name__)


class Outage:
    """Of one store. Any thread may tell it of its writes; without an outage that costs nothing."""

    def __init__(self, store: str, stats: TierStats, clock: Callable[[], float] = time.monotonic) -> None:
        """No outage.

        Args:
            store: what it is called in messages.
            stats: where `disk_problem` and `num_disk_outages` are told.
            clock: seconds that only grow.
        """
        self._store = store
        self._stats = stats
        self._clock = clock
        self._guard = threading.Lock()
        self._problem = ""
        self._began_s = self._failed_s = 0.0

    @property
    def is_out(self) -> bool:
        """Whether an outage has begun and is not over."""
        return bool(self._problem)

    def failed(self, error: Exception) -> None:
        """A write was refused by the store or its device."""
        with self._guard:
            self._failed_s = self._clock()
            if self._problem:
                return
            self._problem, self._began_s = f"{self._store}: {error}", self._failed_s
            self._stats.disk_problem = self._problem
            self._stats.num_disk_outages += 1
        logger.error("%s; what it cannot keep is computed again, and it is tried with every unit", self._problem)

    def worked(self) -> None:
        """A write went well."""
        if not self._problem:
            return
        with self._guard:
            now = self._clock()
            if not self._problem or now - self._failed_s < CALM_S:
                return
            if self._stats.disk_problem == self._problem:
                self._stats.disk_problem = ""
            self._problem = ""
        logger.error("%s: keeps units again, after %.0f s", self._store, now - self._began_s)


__all__ = ["CALM_S", "Outage"]
