"""Synthetic workloads in the trace format, for where there is no trace.

Flow:    kind, number of requests, seed -> [generate_workload] -> TraceRequest list -> run_replay | write_trace

    chat       people in conversations: one of a few system prompts, then turns; every prompt repeats the whole
               conversation so far; half a minute between an answer and the next turn
    agents     tool loops: a long common prompt with tool descriptions, then many short steps in quick succession, each
               with the last tool's output appended
    documents  questions about shared documents, of which some are asked about far more often than others
    scan       chat, and between the conversations long texts that nobody asks about again
    flood      chat, and now and then ten a second short prompts that never come again

Sessions begin at random moments (a Poisson process); lengths are log-normal. Equal arguments give equal workloads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import numpy as np

from kvjax.replay.requests.trace import TRACE_BLOCK_SIZE, TraceRequest


@dataclass
class _Text:
    """A growing text: the hash ids of its blocks and its length in tokens."""

    new_id: Callable[[], int]
    hash_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0

    def append(self, num_tokens: int) -> None:
        """Makes the text longer; blocks that it began stay the same blocks."""
        self.num_tokens += num_tokens
        while len(self.hash_ids) * TRACE_BLOCK_SIZE < self.num_tokens:
            self.hash_ids.append(self.new_id())

    def fork(self) -> _Text:
        """A text that begins with this one. A last block that is not full will go on differently."""
        ids = list(self.hash_ids)
        if self.num_tokens % TRACE_BLOCK_SIZE:
            ids[-1] = self.new_id()
        return _Text(self.new_id, ids, self.num_tokens)

    def request(self, time_s: float, output_length: int) -> TraceRequest:
        """A request with this text as its prompt."""
        return TraceRequest(int(time_s * 1e3), self.num_tokens, output_length, tuple(self.hash_ids))


@dataclass
class _Source:
    """Random numbers and fresh hash ids of one workload."""

    rng: np.random.Generator
    ids: Iterator[int] = field(default_factory=count)

    def text(self, num_tokens: int) -> _Text:
        """A new text."""
        text = _Text(lambda: next(self.ids))
        text.append(num_tokens)
        return text

    def length(self, median: float, spread: float = 0.7, most: int = 32_768) -> int:
        """A number of tokens around `median`, at least 1."""
        return int(np.clip(self.rng.lognormal(np.log(median), spread), 1, most))

    def gap_s(self, mean_s: float) -> float:
        """Seconds until the next event."""
        return float(self.rng.exponential(mean_s))


def _chat(source: _Source, session_gap_s: float) -> Iterator[list[TraceRequest]]:
    prompts = [source.text(source.length(600)) for _ in range(4)]
    start_s = 0.0
    while True:
        start_s += source.gap_s(session_gap_s)
        time_s, text = start_s, prompts[source.rng.integers(len(prompts))].fork()
        session = []
        for _ in range(1 + source.rng.geometric(0.25)):
            text.append(source.length(80))
            output_length = source.length(250, most=2_000)
            session.append(text.request(time_s, output_length))
            text.append(output_length)
            time_s += output_length / 50 + source.gap_s(30.0)
        yield session


def _agents(source: _Source, session_gap_s: float) -> Iterator[list[TraceRequest]]:
    tools = source.text(6_000)
    start_s = 0.0
    while True:
        start_s += source.gap_s(session_gap_s)
        time_s, text = start_s, tools.fork()
        text.append(source.length(400))
        session = []
        for _ in range(3 + source.rng.geometric(0.08)):
            output_length = source.length(120, most=1_000)
            session.append(text.request(time_s, output_length))
            text.append(output_length + source.length(700))
            time_s += output_length / 50 + source.gap_s(2.0)
        yield session


def _documents(source: _Source, session_gap_s: float) -> Iterator[list[TraceRequest]]:
    documents = [source.text(source.length(8_000)) for _ in range(200)]
    popularity = 1 / np.arange(1, len(documents) + 1)
    popularity /= popularity.sum()
    time_s = 0.0
    while True:
        time_s += source.gap_s(session_gap_s)
        text = documents[source.rng.choice(len(documents), p=popularity)].fork()
        text.append(source.length(60))
        yield [text.request(time_s, source.length(200, most=2_000))]


def _scan(source: _Source, session_gap_s: float) -> Iterator[list[TraceRequest]]:
    for session in _chat(source, session_gap_s):
        yield session
        if source.rng.random() < 0.4:
            text = source.text(source.length(16_000))
            yield [text.request(session[0].timestamp_ms / 1e3, source.length(200, most=2_000))]


def _flood(source: _Source, session_gap_s: float) -> Iterator[list[TraceRequest]]:
    for number, session in enumerate(_chat(source, session_gap_s)):
        yield session
        if number % 400 == 200:
            start_s = session[0].timestamp_ms / 1e3
            yield [source.text(source.length(3_000)).request(start_s + i / 10, 50) for i in range(500)]


_KINDS: dict[str, tuple[Callable[[_Source, float], Iterator[list[TraceRequest]]], float]] = {
    "chat": (_chat, 1.0),
    "agents": (_agents, 4.0),
    "documents": (_documents, 0.4),
    "scan": (_scan, 1.0),
    "flood": (_flood, 1.0),
}
WORKLOADS = tuple(_KINDS)


def generate_workload(kind: str, num_requests: int, seed: int = 0) -> list[TraceRequest]:
    """The first `num_requests` requests of an endless workload, in the order of their arrival.

    Raises:
        ValueError: an unknown kind, a number of requests below 1, or a negative seed.
    """
    if kind not in _KINDS:
        raise ValueError(f"expected a workload of {', '.join(WORKLOADS)}, got {kind!r}")
    if num_requests < 1:
        raise ValueError(f"expected num_requests >= 1, got {num_requests}")
    if seed < 0:
        raise ValueError(f"expected seed >= 0, got {seed}")
    sessions, mean_gap_s = _KINDS[kind]
    arrived: list[TraceRequest] = []
    future: list[tuple[int, int, TraceRequest]] = []  # heap by time, then order of generation
    order = count()
    for session in sessions(_Source(np.random.default_rng(seed)), mean_gap_s):
        # No later session begins before this one: what lies before its start is complete.
        while future and future[0][0] <= session[0].timestamp_ms:
            arrived.append(heappop(future)[2])
        if len(arrived) >= num_requests:
            break
        for request in session:
            heappush(future, (request.timestamp_ms, next(order), request))
    return arrived[:num_requests]
