"""A way of a store that fails three times in a row is open until a probe succeeds; it says so once each time."""

from __future__ import annotations

import pytest

from kvjax.tiers.shared.breaker import MOST_FAILURES, Breaker


def test_failures_in_a_row_open_it_and_a_success_begins_the_count_anew(caplog: pytest.LogCaptureFixture) -> None:
    told: list[bool] = []
    breaker = Breaker("reading", on_change=lambda: told.append(breaker.is_open))
    for _ in range(3):
        for number in range(1, MOST_FAILURES):
            breaker.fail(number)
            assert not breaker.is_open
        breaker.succeed()
        assert not breaker.is_open
    assert told == []
    for number in range(MOST_FAILURES + 3):
        breaker.fail(number)
        assert breaker.is_open == (number >= MOST_FAILURES - 1)
    assert breaker.problem == f"reading: {MOST_FAILURES - 1}"
    breaker.succeed()
    assert not breaker.is_open
    assert breaker.problem == ""
    assert told == [True, False]
    assert len(caplog.records) == 2


def test_one_failure_is_enough_where_it_never_worked() -> None:
    breaker = Breaker("reading")
    breaker.fail("gone", is_first=True)
    assert breaker.is_open
