"""Answers to subscribers: what waits for one that does not read is bounded, and the others do not notice."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
import zmq

from kvjax.events import replay_answers
from kvjax.events.replay_answers import ReplayAnswers

LENGTH = 500


class Queues:
    """A ROUTER socket whose clients read when they are told to."""

    def __init__(self) -> None:
        self.queued: Counter[bytes] = Counter()
        self.got: dict[bytes, list[bytes]] = defaultdict(list)
        self.gone: set[bytes] = set()

    def send_multipart(self, frames: tuple[bytes, ...], flags: int) -> None:
        assert flags == zmq.NOBLOCK
        client = frames[0]
        if client in self.gone:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        if self.queued[client] >= replay_answers.MOST_QUEUED:
            raise zmq.Again
        self.queued[client] += 1
        self.got[client].append(frames[3])


def answers_of(queues: Queues, clock: list[float]) -> ReplayAnswers:
    def answer(asked: bytes) -> replay_answers.Messages:
        return ((b"", asked, b"") if i else (b"", asked + b"0", b"") for i in range(LENGTH))

    return ReplayAnswers(zmq, queues, answer, clock=lambda: clock[0])


def test_a_client_that_does_not_read_has_few_messages_and_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_answers, "MOST_QUEUED", 10)
    queues, clock = Queues(), [0.0]
    answers = answers_of(queues, clock)
    for number in range(60):
        answers.take(b"greedy", bytes([number]))
        answers.push()
    assert queues.queued[b"greedy"] == 10
    assert len(answers._clients[b"greedy"].asked) == replay_answers.MOST_ASKED
    for number in range(1_000):
        answers.take(number.to_bytes(2), b"a")
    assert len(answers._clients) == replay_answers.MOST_CLIENTS
    assert answers.wait_ms is not None
    clock[0] = replay_answers.PATIENCE_S + 1.0
    answers.push()
    answers.push()
    clock[0] *= 3
    answers.push()
    assert not answers._clients
    assert answers.wait_ms is None


def test_slow_clients_get_their_answers_whole_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads a few messages at a time, seldom enough to be late if all of an answer had to be read in time."""
    monkeypatch.setattr(replay_answers, "MOST_QUEUED", 7)
    queues, clock = Queues(), [0.0]
    answers = answers_of(queues, clock)
    for client in (b"a", b"b"):
        for asked in (b"x", b"y"):
            answers.take(client, asked)
    while answers._clients:
        answers.push()
        queues.queued.clear()
        clock[0] += 0.5 * replay_answers.PATIENCE_S
    expected = [number for asked in (b"x", b"y") for number in [asked + b"0", *[asked] * (LENGTH - 1)]]
    assert queues.got == {b"a": expected, b"b": expected}


def test_who_has_left_is_forgotten() -> None:
    queues, clock = Queues(), [0.0]
    answers = answers_of(queues, clock)
    queues.gone = {b"a"}
    answers.take(b"a", b"x")
    answers.take(b"b", b"x")
    answers.push()
    assert not answers._clients
    assert len(queues.got[b"b"]) == LENGTH
