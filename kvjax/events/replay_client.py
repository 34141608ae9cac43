"""Asks a publisher's replay socket for kept batches or a snapshot, and bounds how long that takes.

Flow:    ZmqEventSubscriber -> [ReplayClient.ask] -> number and payload of each message
Source:  frames as in `kvjax.events.zmq_publisher`; vLLM before 0.26 answers without a topic
"""

from __future__ import annotations

import time
from typing import Any

from kvjax.events.zmq_publisher import END_OF_REPLAY, SEQ_BYTES

NUM_FRAMES = (4, 3)
MOST_SILENCES = 10  # time of a whole answer, in times that the socket may be silent
MOST_BYTES = 1 << 30  # of a whole answer, each message counted with its overhead
MESSAGE_BYTES = 256


class ReplayClient:
    """One DEALER socket. Used from one thread."""

    def __init__(self, context: Any, kind: int, endpoint: str, timeout_s: float) -> None:
        """Connects a socket of `kind`, DEALER; `timeout_s` is how long it may be silent.

        Raises:
            ZMQError: there is no such endpoint.
        """
        self._context, self._kind, self._endpoint = context, kind, endpoint
        self._timeout_ms = int(timeout_s * 1e3)
        self._socket = self._connect()
        self._may_ask_s = 0.0  # again, on the monotonic clock

    @property
    def is_silent(self) -> bool:
        """Whether it did not answer of late; it is given some time then."""
        return time.monotonic() < self._may_ask_s

    def ask(self, asked: bytes) -> list[tuple[int, bytes]] | None:
        """Number and payload of each message of the answer; None: it did not end in time, or is too long."""
        self._socket.send_multipart((b"", asked))
        answer: list[tuple[int, bytes]] = []
        longest_s = MOST_SILENCES * self._timeout_ms / 1e3
        deadline = time.monotonic() + longest_s
        num_bytes = 0
        while num_bytes <= MOST_BYTES and time.monotonic() < deadline and self._socket.poll(self._timeout_ms):
            frames = self._socket.recv_multipart()
            num_bytes += MESSAGE_BYTES + sum(map(len, frames))
            if len(frames) not in NUM_FRAMES or len(frames[-2]) != SEQ_BYTES:
                continue
            if frames[-2] == END_OF_REPLAY:
                self._may_ask_s = 0.0
                return answer
            answer.append((int.from_bytes(frames[-2], "big"), frames[-1]))
        self._socket.close(linger=0)  # what is late must not be taken for the answer to the next question
        self._socket = self._connect()
        self._may_ask_s = time.monotonic() + longest_s
        return None

    def _connect(self) -> Any:
        socket = self._context.socket(self._kind)
        socket.connect(self._endpoint)
        return socket


__all__ = ["ReplayClient"]
