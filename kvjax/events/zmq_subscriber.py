"""KV events as a router receives them: every batch in order and once, missed ones asked for again, losses told.

Flow:    ZmqEventPublisher, or vLLM's -> [ZmqEventSubscriber.poll] -> EventBatch | CacheUnknown -> PrefixIndex
Source:  frames as in `kvjax.events.zmq_publisher`; vLLM 0.33 distributed/kv_events.py, examples/kv_events_subscriber.py

    number of a live batch    what it means                     what is received
    the next one              nothing was missed                the batch
    above                     batches were missed               those, replayed, then it; or CacheUnknown, then it
    below                     the publisher was restarted       CacheUnknown, all from 0 on, replayed, then it

A publisher that was restarted and is already past the number that was expected looks like a gap; only its own topic or
address can tell it apart.
"""

from __future__ import annotations

import logging
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from kvjax.events.encoding import EventDecoder
from kvjax.events.zmq_publisher import END_OF_REPLAY, SEQ_BYTES
from kvjax.extras import require_extra

if TYPE_CHECKING:
    from kvjax.events import wire

NUM_LIVE_FRAMES, NUM_REPLAY_FRAMES = 3, 4

logger = logging.getLogger(__name__)


class CacheUnknown:
    """Batches are lost, or the publisher began anew: what was known of its cache no longer holds."""


CACHE_UNKNOWN: Final = CacheUnknown()


class ZmqEventSubscriber:
    """One publisher's events. Used from one thread."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        event_form: str = "map",
        replay_timeout_s: float = 2.0,
    ) -> None:
        """Connects; messages that come before ZeroMQ has connected are asked for again, like all that were missed.

        Args:
            endpoint: of the publisher, to connect to.
            replay_endpoint: likewise; None: whatever is missed is lost.
            topic: messages of topics that begin so are heard.
            event_form: of `EventDecoder`.
            replay_timeout_s: how long an answer to a replay may take before it counts as none.

        Raises:
            ValueError: there is no such form, or no such endpoint.
            MissingExtraError: msgspec or pyzmq is not installed.
        """
        self._decoder = EventDecoder(event_form)
        self._zmq = require_extra("zmq", "events", "receiving KV events")
        self._timeout_ms = int(replay_timeout_s * 1e3)
        self._replay_endpoint = replay_endpoint
        self._next_seq = 0
        self._context: Any = self._zmq.Context()
        try:
            self._live = self._context.socket(self._zmq.SUB)
            self._live.subscribe(topic)
            self._live.connect(endpoint)
            self._replay = self._connect_replay()
        except self._zmq.ZMQError as error:
            self.close()
            raise ValueError(f"expected endpoints to connect to, got {endpoint}, {replay_endpoint}: {error}") from error

    def poll(self, timeout_s: float = 0.0) -> list[wire.EventBatch | CacheUnknown]:
        """What has come, oldest first; waits up to `timeout_s` for the first message, and for replays as they take."""
        received: list[wire.EventBatch | CacheUnknown] = []
        wait_ms = int(timeout_s * 1e3)
        while self._live.poll(wait_ms):
            wait_ms = 0
            frames = self._live.recv_multipart()
            if len(frames) != NUM_LIVE_FRAMES or len(frames[1]) != SEQ_BYTES:
                logger.warning("KV events: expected 3 frames, the second of 8 bytes, got %s", list(map(len, frames)))
                continue
            received += self._take(int.from_bytes(frames[1], "big"), frames[2])
        return received

    def _take(self, seq: int, payload: bytes) -> list[wire.EventBatch | CacheUnknown]:
        """One live batch, and what was missed before it."""
        received: list[wire.EventBatch | CacheUnknown] = []
        if seq < self._next_seq:
            received.append(CACHE_UNKNOWN)
            self._next_seq = 0
        if seq > self._next_seq:
            received += self._missed(seq)
        batch = self._decoded(payload)
        self._next_seq = seq + 1
        return [*received, CACHE_UNKNOWN if batch is None else batch]

    def _missed(self, end_seq: int) -> list[wire.EventBatch | CacheUnknown]:
        """Batches from the next number to before `end_seq`, or that they are lost."""
        answers = self._ask(self._next_seq, end_seq)
        batches = [self._decoded(payload) for _, payload in answers]
        known = [batch for batch in batches if batch is not None]
        if [seq for seq, _ in answers] == list(range(self._next_seq, end_seq)) and len(known) == len(batches):
            return list(known)
        return [CACHE_UNKNOWN]

    def _ask(self, start_seq: int, end_seq: int) -> list[tuple[int, bytes]]:
        """Number and payload of the batches in [start_seq, end_seq); none if the answer does not end in time."""
        if self._replay is None:
            return []
        self._replay.send_multipart((b"", start_seq.to_bytes(SEQ_BYTES, "big")))
        answers: list[tuple[int, bytes]] = []
        deadline = time.monotonic() + self._timeout_ms / 1e3
        while self._replay.poll(max(int((deadline - time.monotonic()) * 1e3), 0)):
            frames = self._replay.recv_multipart()
            if len(frames) != NUM_REPLAY_FRAMES:
                continue
            _, _, number, payload = frames
            if number == END_OF_REPLAY:
                return answers
            seq = int.from_bytes(number, "big")
            if start_seq <= seq < end_seq:
                answers.append((seq, payload))
        self._replay.close(linger=0)  # what is late must not be taken for the answer to the next question
        self._replay = self._connect_replay()
        return []

    def _connect_replay(self) -> Any:
        if self._replay_endpoint is None:
            return None
        socket = self._context.socket(self._zmq.DEALER)
        socket.connect(self._replay_endpoint)
        return socket

    def _decoded(self, payload: bytes) -> wire.EventBatch | None:
        try:
            return self._decoder.decode(payload)
        except ValueError:
            logger.exception("KV events: a batch cannot be read and counts as lost")
            return None

    def close(self) -> None:
        """Closes the sockets; a second call does nothing."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


__all__ = ["CACHE_UNKNOWN", "CacheUnknown", "ZmqEventSubscriber"]
