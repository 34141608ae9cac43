"""Which units a shared store has, as far as it was asked: answers, and questions that are on their way.

Flow:    TierScheduler.holds -> [Presence] <- answers, from the store's loop

A unit is one of

    unknown    never asked for, or too long ago
    asked      a lookup is on its way; after its deadline it counts as absent
    there      the store has it, or had it a short while ago
    absent     the store does not have it, or could not say

That a unit is there says where to look, not that it can be read: a store evicts what it likes.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvjax.tiers.units import UnitKey

THERE_S = 60.0  # how long an answer counts
ABSENT_S = 2.0
MAX_UNITS = 1 << 18  # those that were told last; some 300 bytes each


class Answer(enum.Enum):
    """What is known of a unit."""

    UNKNOWN = "unknown"
    ASKED = "asked"
    THERE = "there"
    ABSENT = "absent"


class Presence:
    """Any thread may call it; about a microsecond a unit."""

    def __init__(self, lookup_timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = lookup_timeout_s
        self._clock = clock
        self._guard = threading.Lock()
        self._known: OrderedDict[UnitKey, tuple[Answer, float]] = OrderedDict()  # and until when it counts

    def __len__(self) -> int:
        return len(self._known)

    def of(self, keys: Sequence[UnitKey]) -> list[Answer]:
        """What is known of each unit now."""
        now = self._clock()
        with self._guard:
            return [self._of(key, now) for key in keys]

    def ask(self, keys: Iterable[UnitKey]) -> None:
        """A lookup is on its way."""
        self._tell(keys, Answer.ASKED, self._timeout_s)

    def tell(self, keys: Sequence[UnitKey], are_there: Sequence[bool]) -> None:
        """The store has answered, or has taken or lost units."""
        self._tell([key for key, there in zip(keys, are_there, strict=True) if there], Answer.THERE, THERE_S)
        self._tell([key for key, there in zip(keys, are_there, strict=True) if not there], Answer.ABSENT, ABSENT_S)

    def _tell(self, keys: Iterable[UnitKey], answer: Answer, seconds: float) -> None:
        until = self._clock() + seconds
        with self._guard:
            for key in keys:
                self._known[key] = answer, until
                self._known.move_to_end(key)
            while len(self._known) > MAX_UNITS:
                self._known.popitem(last=False)

    def _of(self, key: UnitKey, now: float) -> Answer:
        answer, until = self._known.get(key, (Answer.UNKNOWN, now))
        if now < until:
            return answer
        if answer is Answer.ASKED:  # its lookup is late, and is not sent again before it is over
            return Answer.ABSENT if now < until + ABSENT_S else Answer.UNKNOWN
        return Answer.UNKNOWN


__all__ = ["Answer", "Presence"]
