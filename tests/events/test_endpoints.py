"""Addresses of ranks, and which of them are bound."""

from __future__ import annotations

import pytest

from kvjax.events.endpoints import endpoint_of_rank, is_bound


@pytest.mark.parametrize(
    ("endpoint", "rank", "of_rank"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://router:5557", 1, "tcp://router:5558"),
        ("tcp://[::]:5557", 2, "tcp://[::]:5559"),
        ("tcp://127.0.0.1:*", 2, "tcp://127.0.0.1:*"),
        ("tcp://127.0.0.1:0", 2, "tcp://127.0.0.1:0"),
        ("tcp://*:65530", 5, "tcp://*:65535"),
        ("inproc://cache", 0, "inproc://cache"),
        ("inproc://cache", 2, "inproc://cache_dp2"),
        ("ipc:///tmp/cache", 1, "ipc:///tmp/cache_dp1"),
    ],
)
def test_a_rank_has_its_own_address(endpoint: str, rank: int, of_rank: str) -> None:
    assert endpoint_of_rank(endpoint, rank) == of_rank


def test_a_rank_beyond_the_last_port_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected ports below 65536, got .*:65530 for data-parallel rank 6"):
        endpoint_of_rank("tcp://*:65530", 6)


@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [
        ("tcp://*:5557", True),
        ("tcp://127.0.0.1:*", True),
        ("tcp://[::]:5557", True),
        ("ipc:///tmp/cache", True),
        ("inproc://cache", True),
        ("tcp://router:5557", False),
    ],
)
def test_wildcards_and_local_transports_are_bound(endpoint: str, bound: bool) -> None:
    assert is_bound(endpoint) == bound
