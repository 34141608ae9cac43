"""Peers that failed are left alone for a while, so that a dead one costs requests no waiting.

Flow:    PageClient -> [Breaker.check] before a pull; [Breaker.succeeded], [Breaker.failed] behind it
Source:  the circuit breaker of M. Nygard, Release It!, 5.2
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvjax.errors import TransferError

NUM_FAILURES = 3  # in a row, from which on a peer is left alone
FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 5.0  # doubled by each further failure


@dataclass
class _Peer:
    num_failures: int = 0
    closed_until_s: float = 0.0


class Breaker:
    """How each peer, by address, has done. Any thread may call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """No peer has failed."""
        self._clock = clock
        self._peers: dict[str, _Peer] = {}
        self._lock = threading.Lock()

    def check(self, address: str) -> None:
        """Nothing, where a peer may be asked.

        Raises:
            TransferError: it has failed several times in a row, the last time a moment ago.
        """
        with self._lock:
            peer = self._peers.get(address)
            left_s = 0.0 if peer is None else peer.closed_until_s - self._clock()
            if peer is not None and left_s > 0:
                raise TransferError(
                    f"{address} has failed {peer.num_failures} times in a row and is asked again in {left_s:.1f} s; "
                    "compute the tokens here"
                )

    def succeeded(self, address: str) -> None:
        """A peer answered."""
        with self._lock:
            self._peers.pop(address, None)

    def failed(self, address: str) -> None:
        """A peer did not answer, or broke off."""
        with self._lock:
            peer = self._peers.setdefault(address, _Peer())
            peer.num_failures += 1
            further = peer.num_failures - NUM_FAILURES
            if further >= 0:
                pause_s = min(LAST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(further, 20))
                peer.closed_until_s = self._clock() + pause_s


__all__ = ["Breaker"]
