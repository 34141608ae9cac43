"""Hit rates over the latest requests."""

from __future__ import annotations

from kvjax.core import CachingMetrics, PrefixCacheStats


def reading(requests: int, queries: int, hits: int, reset: bool = False) -> PrefixCacheStats:
    return PrefixCacheStats(reset=reset, requests=requests, queries=queries, hits=hits)


def test_the_rate_is_of_tokens() -> None:
    metrics = CachingMetrics()
    assert metrics.empty
    assert metrics.hit_rate == 0.0
    metrics.observe(reading(2, 100, 20))
    metrics.observe(reading(1, 100, 70))
    assert not metrics.empty
    assert metrics.hit_rate == 0.45


def test_old_readings_leave_but_the_latest_stays() -> None:
    metrics = CachingMetrics(max_recent_requests=3)
    metrics.observe(reading(2, 10, 0))
    metrics.observe(reading(2, 10, 10))
    assert metrics.hit_rate == 1.0
    metrics.observe(reading(9, 10, 5))
    assert metrics.hit_rate == 0.5
    metrics.observe(reading(0, 0, 0))
    assert metrics.hit_rate == 0.5


def test_a_reset_forgets_what_came_before() -> None:
    metrics = CachingMetrics()
    metrics.observe(reading(1, 10, 10))
    metrics.observe(reading(1, 10, 0, reset=True))
    assert metrics.hit_rate == 0.0
    metrics.observe(reading(0, 0, 0, reset=True))
    assert metrics.empty


def test_preempted_lookups_count_apart() -> None:
    stats = PrefixCacheStats()
    stats.record(10, 4, preempted=False)
    stats.record(7, 6, preempted=True)
    assert stats == PrefixCacheStats(False, 1, 10, 4, 1, 7, 6)
