"""KV events over ZeroMQ: every batch to all subscribers, missed ones again, and what is cached, to those who ask.

Flow:    publish -> queue -> [thread: encode, number, send, keep] -> subscribers; requests -> kept batches or a snapshot
Source:  frames of vLLM 0.33 distributed/kv_events.py (ZmqEventPublisher), replay frames of its pull request 45177

    PUB     -> subscriber   topic, seq, payload
    ROUTER  <- DEALER       b"", start_seq                 numbers are 8 bytes, big-endian
            -> DEALER       b"", topic, seq, payload       for every kept batch from start_seq on, then
                            b"", b"", 8 bytes 0xff, b""
    ROUTER  <- DEALER       b"", 7 bytes 0xff, 0xfe        a snapshot: a number that no batch has, so vLLM's publisher
                                                           answers with the last message alone
            -> DEALER       b"", topic, next_seq, payload  for every part of it (`CachedBlocks`), then
                            b"", b"", 8 bytes 0xff, b""

A snapshot is true when all batches before `next_seq` are taken and none from it on. Its payloads are batches like the
others: their events begin with `AllBlocksCleared`, and BlockStored of all that is cached follow. While it is told, live
batches wait: 5 us a block. An empty payload says that it cannot be told.

A subscriber that sees a number jump asks for the numbers between. If the first answer is above what it asked for, the
batches have left the buffer: then it drops what it knows of this publisher. A number that falls back means that the
publisher was restarted with an empty cache.

States of a publisher, each arrow one call or event:

    open --shutdown--> closing --queue empty, or time is up--> closed
    open --the given context is terminated--> closed
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

from kvjax.core.watch.kv_events import KVCacheEvent
from kvjax.events.cached_blocks import CachedBlocks
from kvjax.events.config import KVEventsConfig
from kvjax.events.encoding import EventEncoder
from kvjax.events.endpoints import endpoint_of_rank, is_bound
from kvjax.events.first_and_last import FirstAndLast
from kvjax.events.publisher import EventPublisher
from kvjax.events.replay_answers import ReplayAnswers
from kvjax.events.replay_buffer import ReplayBuffer
from kvjax.extras import require_extra

if TYPE_CHECKING:
    import zmq

SEQ_BYTES = 8
END_OF_REPLAY = b"\xff" * SEQ_BYTES  # -1
SNAPSHOT = END_OF_REPLAY[1:] + b"\xfe"  # -2
MOST_REQUEST_BYTES = 1_024  # of a frame; who sends more is cut off

logger = logging.getLogger(__name__)


class ZmqEventPublisher(EventPublisher):
    """One PUB socket and, if asked for, one ROUTER socket, both served by a thread of its own.

    `publish` may be called from any thread and costs a few microseconds; it waits only while `max_queue_size` batches
    wait. Batches go out in the order of the calls.
    """

    def __init__(
        self,
        config: KVEventsConfig,
        data_parallel_rank: int = 0,
        *,
        context: zmq.Context | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """A publisher that is open.

        Args:
            config: addresses and sizes; `config.publisher` is not read.
            data_parallel_rank: shifts the ports and is told in every batch.
            context: of whoever shares an inproc address, who terminates it after the publisher; None: its own.
            clock: seconds since the epoch.

        Raises:
            ValueError: a port of the rank exceeds 65535.
            MissingExtraError: pyzmq or msgspec is not installed.
            OSError: an address cannot be bound or connected to.
        """
        self._zmq = require_extra("zmq", "events", "publishing KV events")
        self._encoder = EventEncoder(config.event_form, config.int_block_hashes)
        self._rank = data_parallel_rank
        self._clock = clock
        self._topic = config.topic.encode()
        self._buffer = ReplayBuffer(config.buffer_steps)
        # Only where somebody can ask for it; None: events came that it cannot take.
        self._cached = None if config.replay_endpoint is None else CachedBlocks()
        self._answers: ReplayAnswers | None = None  # likewise
        self._first_and_last = None if config.every_block else FirstAndLast()
        self._next_seq = 0
        self._has_warned = False

        self._max_queue_size = config.max_queue_size
        self._queue: deque[tuple[float, Sequence[KVCacheEvent]]] = deque()
        self._changed = threading.Condition()  # guards the queue, the waking end and the two below
        self._is_open = True
        self._deadline_s: float | None = None  # of the shutdown, on the monotonic clock

        self._owns_context = context is None
        self._context = self._zmq.Context() if context is None else context
        self._sockets: list[zmq.Socket] = []
        try:
            self._open_sockets(config)
        except BaseException:
            self._close_sockets(linger_ms=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kvjax-kv-events", daemon=True)
        self._thread.start()

    # -- for the owner ----------------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """The address that subscribers connect to, with the port that was taken."""
        return self._endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """The address for replay requests; None: there is no replay."""
        return self._replay_endpoint

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Queues the events of one step, oldest first, with the time of this call.

        Raises:
            RuntimeError: the publisher is shut down.
        """
        if not events:
            return
        with self._changed:
            self._changed.wait_for(lambda: len(self._queue) < self._max_queue_size or not self._is_open)
            if not self._is_open:
                raise RuntimeError("expected an open publisher of KV events, got one that is shut down")
            self._queue.append((self._clock(), events))
            if len(self._queue) == 1:
                self._wake()

    def shutdown(self, timeout_s: float = 1.0) -> None:
        """Sends what waits, for at most that long, and ends its thread and sockets. A second call does nothing."""
        with self._changed:
            if self._deadline_s is not None:
                return
            self._deadline_s = time.monotonic() + timeout_s
            if self._is_open:
                self._is_open = False
                self._changed.notify_all()
                self._wake()
        self._thread.join()
        left_s = max(self._deadline_s - time.monotonic(), 0.0)
        self._close_sockets(linger_ms=int(left_s * 1e3))

    def _wake(self) -> None:
        """Lets the thread look at the queue; where earlier calls fill its pipe, it will look anyway."""
        with suppress(self._zmq.Again, self._zmq.ContextTerminated):
            self._waker.send(b"", self._zmq.NOBLOCK)

    # -- sockets ----------------------------------------------------------------------------------------------------

    def _open_sockets(self, config: KVEventsConfig) -> None:
        wake_address = f"inproc://kvjax-kv-events-{id(self)}"
        self._wakened = self._socket(self._zmq.PAIR)
        self._wakened.bind(wake_address)
        self._waker = self._socket(self._zmq.PAIR)
        self._waker.connect(wake_address)

        self._pub = self._socket(self._zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._endpoint = self._attach(self._pub, endpoint_of_rank(config.endpoint, self._rank), may_connect=True)

        self._replay: zmq.Socket | None = None
        self._replay_endpoint: str | None = None
        if config.replay_endpoint is not None:
            self._replay = self._socket(self._zmq.ROUTER)
            ReplayAnswers.limit(self._replay)
            self._replay.maxmsgsize = MOST_REQUEST_BYTES
            address = endpoint_of_rank(config.replay_endpoint, self._rank)
            self._replay_endpoint = self._attach(self._replay, address, may_connect=False)
            self._answers = ReplayAnswers(self._zmq, self._replay, self._answer)

    def _socket(self, kind: int) -> zmq.Socket:
        socket: zmq.Socket = self._context.socket(kind)
        self._sockets.append(socket)
        return socket

    def _attach(self, socket: zmq.Socket, address: str, may_connect: bool) -> str:
        socket.ipv6 = "[" in address
        try:
            if may_connect and not is_bound(address):
                socket.connect(address)
            else:
                socket.bind(address)
        except self._zmq.ZMQError as error:
            raise OSError(error.errno, f"KV events cannot be published at {address}: {error.strerror}") from error
        taken: bytes = socket.getsockopt(self._zmq.LAST_ENDPOINT)  # type: ignore[assignment]
        return taken.rstrip(b"\0").decode()

    def _close_sockets(self, linger_ms: int) -> None:
        for socket in self._sockets:
            socket.close(linger=linger_ms)
        if self._owns_context:
            self._context.term()

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._wakened, self._zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, self._zmq.POLLIN)
        try:
            while self._serve(dict(poller.poll(None if self._answers is None else self._answers.wait_ms))):
                pass
        except self._zmq.ContextTerminated:
            logger.warning("the ZeroMQ context of a KV event publisher was terminated before the publisher")
        finally:
            with self._changed:
                self._is_open = False
                self._changed.notify_all()

    def _serve(self, ready: dict[zmq.Socket, int]) -> bool:
        """Does what there is to do; False: the publisher is shut down, and everything is sent or time is up."""
        while self._wakened in ready and self._wakened.poll(0):
            self._wakened.recv()
        while (batch := self._next_batch()) is not None:
            self._send(*batch)
        if self._replay is not None and self._answers is not None:
            if self._replay in ready:
                self._note_asked(self._replay, self._answers)
            self._answers.push()
        return self._is_open

    def _next_batch(self) -> tuple[float, Sequence[KVCacheEvent]] | None:
        with self._changed:
            is_late = self._deadline_s is not None and time.monotonic() > self._deadline_s
            if is_late and self._queue:
                logger.warning("KV events: %d batches were not sent before the shutdown", len(self._queue))
                self._queue.clear()
            if not self._queue:
                return None
            batch = self._queue.popleft()
            self._changed.notify()
            return batch

    def _send(self, ts: float, events: Sequence[KVCacheEvent]) -> None:
        """A batch that cannot be encoded takes a number all the same: subscribers see that they miss it."""
        events = self._changes(events)
        if not events:
            return
        seq = self._next_seq
        self._next_seq += 1
        self._note_cached(events)
        try:
            payload = self._encoder.encode(events, ts, self._rank)
        except Exception:
            logger.exception("KV events: batch %d cannot be encoded and is left out", seq)
            return
        self._buffer.append(seq, payload)
        self._pub.send_multipart((self._topic, _frame(seq), payload))

    def _changes(self, events: Sequence[KVCacheEvent]) -> Sequence[KVCacheEvent]:
        """What of the events is told."""
        try:
            return events if self._first_and_last is None else self._first_and_last.told(events)
        except Exception:
            self._first_and_last = None
            logger.exception("KV events: who holds a hash is not counted any more, from now on each block is told")
            return events

    def _note_cached(self, events: Sequence[KVCacheEvent]) -> None:
        try:
            if self._cached is not None:
                self._cached.apply(events)
        except Exception:
            self._cached = None
            logger.exception("KV events: what is cached is not known any more, subscribers get no snapshot")

    def _note_asked(self, replay: zmq.Socket, answers: ReplayAnswers) -> None:
        request = replay.recv_multipart()
        if len(request) != 3 or request[1] or len(request[2]) != SEQ_BYTES:
            if not self._has_warned:
                self._has_warned = True
                lengths = [len(frame) for frame in request[1:]]
                logger.warning("KV events: expected a replay request of frames of 0 and 8 bytes, got %s", lengths)
            return
        answers.take(request[0], request[2])

    def _answer(self, asked: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Topic, number and payload of each message of an answer, as of now: what is published later changes none."""
        messages = list(self._snapshot() if asked == SNAPSHOT else self._kept(asked))
        return chain(((self._topic, *message) for message in messages), [(b"", END_OF_REPLAY, b"")])

    def _kept(self, asked: bytes) -> Iterator[tuple[bytes, bytes]]:
        for seq, payload in self._buffer.since(int.from_bytes(asked, "big")):
            yield _frame(seq), payload

    def _snapshot(self) -> Iterator[tuple[bytes, bytes]]:
        """Number and payload of each part; none, or one without a payload, where an event cannot be told."""
        if self._cached is None:
            return
        number, now = _frame(self._next_seq), self._clock()
        try:
            for part in self._cached.snapshot():
                yield number, self._encoder.encode(part, now, self._rank)
        except Exception:
            logger.exception("KV events: what is cached cannot be encoded, and is told to nobody")
            yield number, b""


def _frame(seq: int) -> bytes:
    return seq.to_bytes(SEQ_BYTES, "big")
