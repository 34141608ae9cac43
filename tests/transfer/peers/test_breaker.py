"""A peer that fails again and again is left alone, for longer each time, and asked again."""

from __future__ import annotations

import pytest

from kvjax.errors import TransferError
from kvjax.transfer.peers.breaker import FIRST_PAUSE_S, LAST_PAUSE_S, NUM_FAILURES, Breaker


def test_pauses_double_up_to_the_longest_and_end_with_an_answer() -> None:
    now = 0.0
    breaker = Breaker(clock=lambda: now)
    assert NUM_FAILURES == 3, "as the guide says"
    for _ in range(NUM_FAILURES - 1):
        breaker.failed("a")
        breaker.check("a")
    for i in range(12):
        breaker.failed("a")
        pause_s = min(LAST_PAUSE_S, FIRST_PAUSE_S * 2**i)
        now += 0.99 * pause_s
        with pytest.raises(TransferError, match=rf"a has failed {NUM_FAILURES + i} times in a row"):
            breaker.check("a")
        breaker.check("b")
        now += 0.02 * pause_s
        breaker.check("a")
    breaker.succeeded("a")
    breaker.failed("a")
    breaker.check("a")
