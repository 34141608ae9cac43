"""Offers that nobody takes give their memory back."""

from __future__ import annotations

import secrets
import time

import jax.numpy as jnp

from kvjax.transfer import SentHeader, SentRequest
from kvjax.transfer.peers.offers import Offers

BYTES = 4 * 100


def entries() -> SentRequest:
    return SentRequest(SentHeader(0, 1, "", ()), ((jnp.zeros(100, jnp.float32),),))


def added(offers: Offers) -> bytes:
    """The id of new entries."""
    offer_id = secrets.token_bytes(16)
    offers.add(offer_id, entries())
    return offer_id


def wait_until_empty(offers: Offers) -> None:
    end_s = time.monotonic() + 20
    while len(offers):
        assert time.monotonic() < end_s


def test_what_nobody_takes_is_forgotten_in_its_time() -> None:
    offers = Offers(0.05, 1 << 30)
    ids = [added(offers) for _ in range(60)]
    wait_until_empty(offers)
    assert (offers.num_bytes, offers.num_expired) == (0, 60)
    assert offers.get(ids[1]) is None
    added(offers)  # also once the thread has had nothing to wait for
    wait_until_empty(offers)
    offers.close()


def test_the_oldest_give_way_to_what_is_new() -> None:
    offers = Offers(1e6, 3 * BYTES)
    ids = [added(offers) for _ in range(5)]
    assert [offers.get(offer_id) is not None for offer_id in ids] == [False, False, True, True, True]
    assert (offers.num_bytes, offers.num_expired) == (3 * BYTES, 2)
    offers.drop(ids[3])
    offers.drop(ids[3])
    assert offers.num_bytes == 2 * BYTES
    offers.close()
    assert len(offers) == 0


def test_one_that_is_larger_than_all_is_kept_alone() -> None:
    offers = Offers(1e6, 1)
    ids = [added(offers) for _ in range(2)]
    assert offers.get(ids[0]) is None
    assert offers.get(ids[1]) is not None
    offers.close()
