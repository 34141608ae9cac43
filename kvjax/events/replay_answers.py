"""Answers to subscribers who asked, each sent as its subscriber reads.

Flow:    ZmqEventPublisher: request -> [ReplayAnswers.take] -> answers -> [ReplayAnswers.push] -> ROUTER socket

What waits for one client is `MOST_QUEUED` messages in ZeroMQ's queue and, here, references to kept batches and at most
`MOST_ASKED` requests. A client that reads nothing for `PATIENCE_S` is answered no more. TCP breaks its connection at
about that time, which frees its queue.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

MOST_QUEUED = 1_000  # messages of one client
MOST_ASKED = 16  # requests of one client that wait
MOST_CLIENTS = 64  # that wait at once
PATIENCE_S = 30.0
RETRY_MS = 5  # between looks whether a client has read

Messages = Iterator[tuple[bytes, bytes, bytes]]  # topic, number, payload

logger = logging.getLogger(__name__)


@dataclass
class _Client:
    """Who asked."""

    asked: deque[bytes] = field(default_factory=deque)
    left: Messages = field(default_factory=lambda: iter(()))  # of the answer under way
    next: tuple[bytes, bytes, bytes] | None = None  # of it, that its queue had no room for
    read_s: float = 0.0  # when its queue last had room


class ReplayAnswers:
    """Of one ROUTER socket. Owned by the publisher's thread."""

    def __init__(
        self, zmq: Any, socket: Any, answer: Callable[[bytes], Messages], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """No answers.

        Args:
            zmq: the module.
            socket: ROUTER, bound; its limits are set by `limit`.
            answer: all messages of the answer to a request, its end among them; they change no more.
            clock: seconds that only grow.
        """
        self._zmq, self._socket, self._answer, self._clock = zmq, socket, answer, clock
        self._clients: dict[bytes, _Client] = {}

    @staticmethod
    def limit(socket: Any) -> None:
        """Sets what a ROUTER socket keeps for each client. To be called before it is bound."""
        socket.sndhwm = MOST_QUEUED
        socket.router_mandatory = True  # who has left or has a full queue raises
        socket.tcp_maxrt = int(PATIENCE_S * 1e3)

    @property
    def wait_ms(self) -> int | None:
        """How long the thread may sleep; None: until it is woken."""
        return RETRY_MS if self._clients else None

    def take(self, client_id: bytes, asked: bytes) -> None:
        """Notes a request; too many of them are dropped."""
        client = self._clients.get(client_id)
        if client is None and len(self._clients) < MOST_CLIENTS:
            client = self._clients[client_id] = _Client(read_s=self._clock())
        if client is not None and len(client.asked) < MOST_ASKED:
            client.asked.append(asked)
        else:
            logger.info("KV events: a request for a replay is dropped, too many wait")

    def push(self) -> None:
        """Sends to each client what its queue has room for."""
        for client_id, client in list(self._clients.items()):
            try:
                is_done = self._push(client_id, client)
            except self._zmq.ContextTerminated:
                raise
            except self._zmq.ZMQError as error:  # it has left
                logger.info("KV events: an answer to a subscriber is cut off: %s", error)
                is_done = True
            if is_done:
                del self._clients[client_id]

    def _push(self, client_id: bytes, client: _Client) -> bool:
        """Whether nothing is left for the client, or it is given up."""
        while True:
            if client.next is None:
                client.next = next(client.left, None)
            if client.next is None:
                if not client.asked:
                    return True
                client.left = self._answer(client.asked.popleft())
                continue
            try:
                self._socket.send_multipart((client_id, b"", *client.next), self._zmq.NOBLOCK)
            except self._zmq.Again:
                is_late = self._clock() - client.read_s > PATIENCE_S
                if is_late:
                    logger.info("KV events: an answer to a subscriber is cut off: it reads nothing")
                return is_late
            client.next, client.read_s = None, self._clock()


__all__ = ["ReplayAnswers"]
