"""KV events as a router receives them: what is cached, then every batch in order and once; losses are told.

Flow:    ZmqEventPublisher, or vLLM's, SGLang's -> [ZmqEventSubscriber.poll] -> EventBatch | CacheUnknown -> PrefixIndex
Source:  frames as in `kvjax.events.zmq_publisher`; vLLM 0.33 distributed/kv_events.py, examples/kv_events_subscriber.py

At first, and whenever batches are lost, the cache is rebuilt: from a snapshot, or from all batches from number 0 on
where the publisher has no snapshots but those, vLLM's for example. Either begins with `AllBlocksCleared`.
`CacheUnknown` says that it could not be: what follows is not all that is cached, until it is rebuilt or cleared.

    number of a live batch    what it means                     what is received
    the next one              nothing was missed                the batch
    above                     batches were missed               those, replayed, then it
    below                     the publisher was restarted, or   the cache, rebuilt
                              the cache as rebuilt has it
    any, if it cannot be      batches are lost                  the cache, rebuilt; or CacheUnknown, then the batch
    read, or that fails

What waits of the live batches before a cache is rebuilt is dropped, since what is rebuilt covers it. Replays begin
with the batch that was taken last: if it is another one now, the publisher was restarted. One that was, and comes to
just the number that is expected, is not noticed. What is missed while no batch follows is seen when the next one comes.
"""

from __future__ import annotations

import logging
from collections import deque
from itertools import count
from operator import eq
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from kvjax.events.encoding import EventDecoder
from kvjax.events.replay_client import ReplayClient
from kvjax.events.zmq_publisher import SEQ_BYTES, SNAPSHOT
from kvjax.extras import require_extra

if TYPE_CHECKING:
    from kvjax.events import wire

NUM_FRAMES = 3
MOST_AT_ONCE = 100_000  # live batches of one `poll`
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
        self._waiting: deque[tuple[int, bytes]] = deque()  # live batches that were taken off the socket
        self._next_seq, self._last = 0, b""  # the number that is expected, and the payload of the one before
        self._is_known: bool | None = None  # whether all that is cached was received; None: `poll` was not called yet
        self._can_rebuild = replay_endpoint is not None
        self._warned: set[str] = set()
        self._replay: ReplayClient | None = None
        self._context: Any = self._zmq.Context()
        try:
            self._live = self._context.socket(self._zmq.SUB)
            self._live.subscribe(topic)
            self._live.connect(endpoint)
            if replay_endpoint is not None:
                self._replay = ReplayClient(self._context, self._zmq.DEALER, replay_endpoint, replay_timeout_s)
        except self._zmq.ZMQError as error:
            self.close()
            raise ValueError(f"expected endpoints to connect to, got {endpoint}, {replay_endpoint}: {error}") from error

    def poll(self, timeout_s: float = 0.0) -> list[wire.EventBatch | CacheUnknown]:
        """What has come, oldest first; waits up to `timeout_s` for the first message, and for answers as they take."""
        received: list[wire.EventBatch | CacheUnknown] = []
        if not self._is_known:
            received += self._rebuilt()
            if self._is_known is None:
                self._is_known = False
                received.append(CACHE_UNKNOWN)
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
            if len(frames) == NUM_FRAMES and len(frames[1]) == SEQ_BYTES:
                self._waiting.append((int.from_bytes(frames[1], "big"), frames[2]))
            else:
                self._warn("KV events: expected 3 frames, the second of 8 bytes, got %s", list(map(len, frames)))

    def _take(self, seq: int, payload: bytes) -> list[wire.EventBatch | CacheUnknown]:
        """One live batch, and what was missed before it; or the cache, rebuilt, which has both."""
        if seq < self._next_seq:
            self._can_rebuild = self._replay is not None  # another publisher may be able to
            if rebuilt := self._rebuilt():
                return rebuilt
            self._next_seq = 0
        missed, batches = self._missed(seq), self._batches([payload])
        if (missed is None or batches is None) and (rebuilt := self._rebuilt()):
            return rebuilt
        is_first = not self._next_seq
        self._next_seq, self._last = seq + 1, payload
        if missed is None or batches is None:
            self._is_known = False
            return [CACHE_UNKNOWN, *(batches or ())]
        if is_first:
            self._is_known = True
            missed = [self._nothing, *missed]
        return [*missed, *batches]

    def _rebuilt(self) -> list[wire.EventBatch | CacheUnknown]:
        """All that is cached after every batch that came so far, and perhaps later ones; none: it is not told."""
        if self._replay is None or not self._can_rebuild or self._replay.is_silent:
            return []
        self._hear()
        parts = self._replay.ask(SNAPSHOT)
        rebuilt = self._from_snapshot(parts) if parts or parts is None else self._from_zero(self._replay)
        if rebuilt:
            self._waiting.clear()
            self._is_known = True
        else:
            self._can_rebuild = self._replay.is_silent  # then it is asked again
        return rebuilt

    def _from_snapshot(self, parts: list[tuple[int, bytes]] | None) -> list[wire.EventBatch | CacheUnknown]:
        batches = self._batches([payload for _, payload in parts or ()])
        if not parts or not batches:
            return []
        self._next_seq, self._last = parts[0][0], b""
        return batches

    def _from_zero(self, replay: ReplayClient) -> list[wire.EventBatch | CacheUnknown]:
        """Every batch that there ever was, and before them that nothing is cached; none: the first are lost."""
        answer = replay.ask(bytes(SEQ_BYTES))
        batches = self._batches([payload for _, payload in answer or ()])
        if answer is None or batches is None or not _is_run(answer, 0, len(answer)):
            return []
        self._next_seq, self._last = len(answer), answer[-1][1] if answer else b""
        return [self._nothing, *batches]

    def _missed(self, end_seq: int) -> list[wire.EventBatch | CacheUnknown] | None:
        """The batches from the expected one to before `end_seq`; None: they are lost."""
        start_seq = self._next_seq
        if start_seq == end_seq:
            return []
        if self._replay is None:
            return None
        first_seq = max(start_seq - 1, 0)
        answer = self._replay.ask(first_seq.to_bytes(SEQ_BYTES, "big")) or []
        found = [(seq, payload) for seq, payload in answer if first_seq <= seq < end_seq]
        if not _is_run(found, first_seq, end_seq):
            return None
        if start_seq and found[0][1] != self._last:
            return None
        return self._batches([payload for _, payload in found[start_seq - first_seq :]])

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

    def close(self) -> None:
        """Closes the sockets; a second call does nothing."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _is_run(answer: list[tuple[int, bytes]], first_seq: int, end_seq: int) -> bool:
    """Whether an answer has each number of [first_seq, end_seq) once, in order; however many they would be."""
    return len(answer) == end_seq - first_seq and all(map(eq, (seq for seq, _ in answer), count(first_seq)))


__all__ = ["CACHE_UNKNOWN", "CacheUnknown", "ZmqEventSubscriber"]
