"""A subscriber that notices missed batches by their numbers and asks for them again."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import zmq

from kvjax.events import ZmqEventPublisher

TIMEOUT_MS = 60_000
END = b"\xff" * 8


class Subscriber:
    """Hands payloads to `apply` in order, each once. `lose(seq)` says which live messages never arrive."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        apply: Callable[[bytes], None],
        *,
        topic: str = "",
        lose: Callable[[int], bool] = lambda seq: False,
    ) -> None:
        self.apply = apply
        self.lose = lose
        self.next_seq = 0
        self.num_replayed = 0
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.subscribe(topic)
        self._live.connect(endpoint)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.rcvtimeo = TIMEOUT_MS
        if replay_endpoint is not None:
            self._replay.connect(replay_endpoint)

    def receive(self, timeout_ms: int = 0) -> list[bytes] | None:
        """The frames of the next live message, None if there is none in time."""
        return self._live.recv_multipart() if self._live.poll(timeout_ms) else None

    def poll(self, timeout_ms: int = 0) -> bool:
        """Takes the next live message, and what was missed before it."""
        frames = self.receive(timeout_ms)
        if frames is None:
            return False
        _, number, payload = frames
        seq = int.from_bytes(number, "big")
        if self.lose(seq):
            return True
        if seq > self.next_seq:
            self.catch_up(seq)
        if seq == self.next_seq:
            self._take(payload)
        return True

    def catch_up(self, end_seq: int | None = None) -> None:
        """Takes what was published from the next number on, up to `end_seq`."""
        for _, seq, payload in self.ask(self.next_seq):
            if end_seq is not None and seq >= end_seq:
                continue
            assert seq == self.next_seq, "batches left the buffer"
            self._take(payload)
            self.num_replayed += 1

    def ask(self, start_seq: int) -> list[tuple[bytes, int, bytes]]:
        """Topic, number and payload of each replayed batch."""
        self._replay.send_multipart((b"", start_seq.to_bytes(8, "big")))
        answers = []
        while True:
            empty, topic, number, payload = self._replay.recv_multipart()
            assert empty == b""
            if number == END:
                assert (topic, payload) == (b"", b"")
                return answers
            answers.append((topic, int.from_bytes(number, "big"), payload))

    def _take(self, payload: bytes) -> None:
        self.apply(payload)
        self.next_seq += 1

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)


def wait_until_sent(publisher: ZmqEventPublisher) -> None:
    """Waits for an answer of the publisher's thread, which first sends all that was published."""
    with Subscriber(publisher.endpoint, publisher.replay_endpoint, id) as asking:
        asking.ask(int.from_bytes(END, "big"))
