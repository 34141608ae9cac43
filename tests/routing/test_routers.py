"""Routers pick the replica that their rule says."""

from __future__ import annotations

import pytest

from kvjax.routing import LeastLoadedRouter, PrefixAwareRouter, ReplicaState, RoundRobinRouter, make_router

IDLE = ReplicaState(0, 0, 0)


def test_round_robin_goes_around() -> None:
    router = RoundRobinRouter()
    assert [router.pick(100, [IDLE] * 3) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_a_hit_wins_until_its_replica_is_busier_by_as_much() -> None:
    """1,000 prompt tokens, 600 of them cached on replica 1: worth 600 tokens that it holds or must prefill."""
    router = PrefixAwareRouter()
    assert router.pick(1_000, [IDLE, ReplicaState(600, 0, 599)]) == 1
    assert router.pick(1_000, [IDLE, ReplicaState(600, 301, 300)]) == 0


def test_the_weight_of_prefill_decides() -> None:
    busy_hit = ReplicaState(600, 0, 900)
    assert PrefixAwareRouter(1.0).pick(1_000, [IDLE, busy_hit]) == 0
    assert PrefixAwareRouter(2.0).pick(1_000, [IDLE, busy_hit]) == 1


def test_the_least_loaded_is_blind_to_hits() -> None:
    assert LeastLoadedRouter().pick(1_000, [ReplicaState(999, 10, 10), ReplicaState(0, 10, 9)]) == 1


@pytest.mark.parametrize("name", ["least_loaded", "prefix"])
def test_equals_take_turns(name: str) -> None:
    router = make_router(name)
    assert [router.pick(100, [IDLE] * 3) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="expected a router of round_robin, least_loaded, prefix, got 'random'"):
        make_router("random")
    with pytest.raises(ValueError, match="prefill_weight > 0"):
        PrefixAwareRouter(0)
