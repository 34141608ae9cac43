"""The latest published batches, for subscribers that missed some.

Flow:    ZmqEventPublisher -> [ReplayBuffer] -> replay replies

Sequence numbers rise by one from 0. One that failed to be sent is missing here too: a subscriber sees the gap, asks,
and learns from the answer that its index cannot be completed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice


class ReplayBuffer:
    """At most `capacity` payloads by sequence number. Owned by the publisher's thread."""

    def __init__(self, capacity: int) -> None:
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=capacity)

    def append(self, seq: int, payload: bytes) -> None:
        """Keeps a batch with a number above all before; the oldest makes room."""
        self._batches.append((seq, payload))

    def since(self, start_seq: int) -> Iterator[tuple[int, bytes]]:
        """The kept batches from `start_seq` on, oldest first."""
        count = 0
        for seq, _ in reversed(self._batches):
            if seq < start_seq:
                break
            count += 1
        return islice(self._batches, len(self._batches) - count, None)
