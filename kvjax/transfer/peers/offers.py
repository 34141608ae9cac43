"""Entries that wait to be pulled: each under an id of its own, until it is taken or its time is over.

Flow:    PageServer.offer -> [Offers] -> pulls of peers;   a thread forgets what nobody took
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

from kvjax.transfer.head_part import ALL, HeadPart
from kvjax.transfer.sent_request import SentRequest


@dataclass(frozen=True)
class Offer:
    """Entries that wait."""

    sent: SentRequest
    share: HeadPart  # of the heads, that this process has
    num_bytes: int
    end_s: float


class Offers:
    """The offers of one process. Any thread may call."""

    def __init__(self, ttl_s: float, max_bytes: int) -> None:
        """No offers. Over `max_bytes` the oldest go; the newest stays whatever its size."""
        self.num_expired = 0  # that nobody took in time, or that gave way to newer ones
        self._ttl_s, self._max_bytes = ttl_s, max_bytes
        self._offers: OrderedDict[bytes, Offer] = OrderedDict()  # by age
        self._num_bytes = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._expire, name="kvjax-offers", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._offers)

    @property
    def num_bytes(self) -> int:
        """Of all entries that wait."""
        return self._num_bytes

    def add(self, offer_id: bytes, sent: SentRequest, share: HeadPart = ALL) -> None:
        """Keeps entries under an id that nobody can guess."""
        num_bytes = sum(own.data.nbytes for arrays in sent.arrays for one in arrays for own in one.addressable_shards)
        with self._changed:
            self._offers[offer_id] = Offer(sent, share, num_bytes, time.monotonic() + self._ttl_s)
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes and len(self._offers) > 1:
                self._forget_oldest()
            self._changed.notify()

    def get(self, offer_id: bytes) -> Offer | None:
        """What waits under an id."""
        with self._changed:
            return self._offers.get(offer_id)

    def drop(self, offer_id: bytes) -> None:
        """Forgets an offer, if it is there; a pull that is under way goes on."""
        with self._changed:
            offer = self._offers.pop(offer_id, None)
            self._num_bytes -= 0 if offer is None else offer.num_bytes

    def close(self) -> None:
        """Forgets all, and ends the thread."""
        with self._changed:
            self._offers.clear()
            self._num_bytes, self._is_closed = 0, True
            self._changed.notify()
        self._thread.join()

    def _forget_oldest(self) -> None:
        _, offer = self._offers.popitem(last=False)
        self._num_bytes -= offer.num_bytes
        self.num_expired += 1

    def _expire(self) -> None:
        with self._changed:
            while not self._is_closed:
                now = time.monotonic()
                while self._offers and self._oldest.end_s <= now:
                    self._forget_oldest()
                self._changed.wait(self._oldest.end_s - now if self._offers else None)

    @property
    def _oldest(self) -> Offer:
        return next(iter(self._offers.values()))


__all__ = ["Offer", "Offers"]
