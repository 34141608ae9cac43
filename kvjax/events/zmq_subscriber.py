"""KV events as a router receives them: what is cached, then every batch in order and once; losses are told.

Flow:    ZmqEventPublisher, or vLLM's, SGLang's -> [ZmqEventSubscriber.poll] -> EventBatch | CacheUnknown -> PrefixIndex
Source:  frames as in `kvjax.events.zmq_publisher`; vLLM 0.33 distributed/kv_events.py, examples/kv_events_subscriber.py

The first call asks for a snapshot: batches whose first event is `AllBlocksCleared`. A publisher that has none, vLLM's
for example, is `CacheUnknown` until number 0 or `AllBlocksCleared` comes, live or replayed.

    number of a live batch    what it means                     what is received
    the next one              nothing was missed                the batch
    above                     batches were missed               those, replayed, then it
    below                     a snapshot has it already, or     a snapshot; or all from 0 on, replayed, then it
                              the publisher was restarted
    any, if that fails,       batches are lost                  a snapshot; or CacheUnknown, and what can be read
    or it cannot be read

Before a snapshot is asked for, what waits of the live batches is taken off, since the snapshot covers it. A publisher
that was restarted and is already past the number that was expected looks like a gap; only its own topic or address can
tell it apart. What is missed while no batch follows is seen when the next one comes.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from kvjax.events.encoding import EventDecoder
from kvjax.events.zmq_publisher import END_OF_REPLAY, SEQ_BYTES, SNAPSHOT
from kvjax.extras import require_extra

if TYPE_CHECKING:
    from kvjax.events import wire

NUM_LIVE_FRAMES, NUM_REPLAY_FRAMES = 3, (4, 3)  # vLLM before 0.26 replays without a topic
MOST_AT_ONCE = 100_000  # live batches of one `poll`
MOST_SILENCES = 10  # time of a whole answer, in times that the replay socket may be silent

NOTHING = b"\x92\x00\x91\x91\xb0AllBlocksCleared"  # a batch: before number 0 nothing is cached

logger = logging.getLogger(__name__)


class CacheUnknown:
    """Batches are lost, or never came: what was known of the publisher's cache no longer holds."""


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
        """Connects; messages that come before ZeroMQ has connected are asked for, like all that were missed.

        Args:
            endpoint: of the publisher, to connect to.
            replay_endpoint: likewise, for snapshots too; None: whatever is missed is lost.
            topic: messages of topics that begin so are heard.
            event_form: of `EventDecoder`.
            replay_timeout_s: how long the replay socket may be silent before its answer counts as none.

        Raises:
            ValueError: there is no such form, or no such endpoint.
            MissingExtraError: msgspec or pyzmq is not installed.
        """
        self._decoder = EventDecoder(event_form)
        self._nothing = self._decoder.decode(NOTHING)
        self._zmq = require_extra("zmq", "events", "receiving KV events")
        self._timeout_ms = int(replay_timeout_s * 1e3)
        self._replay_endpoint = replay_endpoint
        self._waiting: deque[tuple[int, bytes]] = deque()  # live batches that were taken off the socket
        self._next_seq: int | None = None  # None: nothing was asked or heard yet
        self._has_snapshots = replay_endpoint is not None
        self._warned: set[str] = set()
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
        """What has come, oldest first; waits up to `timeout_s` for the first message, and for answers as they take."""
        received: list[wire.EventBatch | CacheUnknown] = []
        if self._next_seq is None:
            self._next_seq = 0
            received += self._snapshot() or [CACHE_UNKNOWN]
        self._hear(int(timeout_s * 1e3))
        while self._waiting:
            received += self._take(*self._waiting.popleft())
        return received

    def _hear(self, wait_ms: int = 0) -> None:
        """Takes live batches off the socket."""
        for _ in range(MOST_AT_ONCE):
            if not self._live.poll(wait_ms):
                return
            wait_ms = 0
            frames = self._live.recv_multipart()
            if len(frames) == NUM_LIVE_FRAMES and len(frames[1]) == SEQ_BYTES:
                self._waiting.append((int.from_bytes(frames[1], "big"), frames[2]))
            else:
                self._warn("KV events: expected 3 frames, the second of 8 bytes, got %s", list(map(len, frames)))

    def _take(self, seq: int, payload: bytes) -> list[wire.EventBatch | CacheUnknown]:
        """One live batch, and what was missed before it; or a snapshot, which has both."""
        assert self._next_seq is not None  # `poll` began
        if seq < self._next_seq:
            self._has_snapshots = self._replay is not None
            if snapshot := self._snapshot():
                return snapshot
            self._next_seq = 0
        start_seq, missed, batches = self._next_seq, self._missed(self._next_seq, seq), self._batches([payload])
        if (missed is None or batches is None) and (snapshot := self._snapshot()):
            return snapshot
        self._next_seq = seq + 1
        received = [*([CACHE_UNKNOWN] if missed is None else missed), *(batches or [CACHE_UNKNOWN])]
        return received if start_seq or missed is None else [self._nothing, *received]

    def _snapshot(self) -> list[wire.EventBatch | CacheUnknown]:
        """All that is cached after every batch that came so far, and perhaps later ones; none: it is not told."""
        if not self._has_snapshots:
            return []
        self._hear()
        parts = self._ask(SNAPSHOT)
        batches = self._batches([payload for _, payload in parts or ()])
        self._has_snapshots = bool(parts and batches)
        if not parts or not batches:
            return []
        self._waiting.clear()
        self._next_seq = parts[0][0]
        return batches

    def _missed(self, start_seq: int, end_seq: int) -> list[wire.EventBatch | CacheUnknown] | None:
        """The batches in [start_seq, end_seq); None: they are lost."""
        if start_seq == end_seq:
            return []
        answers = self._ask(start_seq.to_bytes(SEQ_BYTES, "big")) or []
        missed = [(seq, payload) for seq, payload in answers if start_seq <= seq < end_seq]
        if len(missed) < end_seq - start_seq or [seq for seq, _ in missed] != list(range(start_seq, end_seq)):
            return None
        return self._batches([payload for _, payload in missed])

    def _batches(self, payloads: list[bytes]) -> list[wire.EventBatch | CacheUnknown] | None:
        """None: one of them cannot be read."""
        try:
            return list(map(self._decoder.decode, payloads))
        except ValueError as error:
            self._warn("KV events: a batch cannot be read and counts as lost: %s", error)
            return None

    def _warn(self, message: str, *arguments: object) -> None:
        """Logs each kind of message once: a publisher that sends one such sends many."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *arguments)

    def _ask(self, asked: bytes) -> list[tuple[int, bytes]] | None:
        """Number and payload of each message of an answer; None: it does not end in time."""
        if self._replay is None:
            return None
        self._replay.send_multipart((b"", asked))
        answers: list[tuple[int, bytes]] = []
        deadline = time.monotonic() + MOST_SILENCES * self._timeout_ms / 1e3
        while time.monotonic() < deadline and self._replay.poll(self._timeout_ms):
            frames = self._replay.recv_multipart()
            if len(frames) not in NUM_REPLAY_FRAMES or len(frames[-2]) != SEQ_BYTES:
                continue
            if frames[-2] == END_OF_REPLAY:
                return answers
            answers.append((int.from_bytes(frames[-2], "big"), frames[-1]))
        self._replay.close(linger=0)  # what is late must not be taken for the answer to the next question
        self._replay = self._connect_replay()
        return None

    def _connect_replay(self) -> Any:
        if self._replay_endpoint is None:
            return None
        socket = self._context.socket(self._zmq.DEALER)
        socket.connect(self._replay_endpoint)
        return socket

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
