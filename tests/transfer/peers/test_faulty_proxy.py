"""Over a network that delays, drops, duplicates, truncates, reorders and flips: what arrives is what was sent."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import chex
import pytest

from kvjax.errors import TransferError
from kvjax.transfer.peers.breaker import Breaker
from tests.transfer.peers.faulty_proxy import faulty_proxy
from tests.transfer.peers.one_offer import one_offer

TIMEOUT_S = 0.5


@pytest.mark.parametrize("num_pulls", [30, pytest.param(1_000, marks=[pytest.mark.sweep, pytest.mark.timeout(3_600)])])
def test_a_pull_brings_what_was_sent_or_raises_in_time(num_pulls: int) -> None:
    """Once the network is well the next pull succeeds; offers that were not taken are forgotten."""
    num_lost, seconds = 0, itertools.count(0, 100)
    with (
        one_offer(offer_ttl_s=3 * TIMEOUT_S, timeout_s=TIMEOUT_S) as one,
        faulty_proxy(one.server.address, 0.05) as proxy,
    ):
        one.client._breaker = Breaker(clock=lambda: float(next(seconds)))  # so that every pull is tried

        def pull() -> None:
            ticket = one.client.read(one.offer())
            ticket = replace(ticket, sources=(replace(ticket.sources[0], address=proxy.address),))
            arrival = one.client.pull(ticket, one.writer)
            chex.assert_trees_all_equal(arrival.wait(3 * TIMEOUT_S).arrays, one.sent.arrays)

        for _ in range(num_pulls):
            begin_s = time.monotonic()
            try:
                pull()
            except TransferError:
                num_lost += 1
            assert time.monotonic() < begin_s + 10 * TIMEOUT_S
        assert min(proxy.counts.values()) > 0 or num_pulls < 1_000
        assert 0.05 * num_pulls < num_lost < 0.7 * num_pulls
        proxy.rate = 0.0
        end_s = time.monotonic() + 30
        while True:
            try:
                pull()
                break
            except TransferError:
                assert time.monotonic() < end_s
        while one.server.num_offers:
            assert time.monotonic() < end_s
