"""Sessions without times of their own, run by users at once.

Flow:    sessions in order -> [at_once] -> TraceRequest list in order of time

Each user runs one session at a time; the next one of the file goes to whoever is free first. A turn waits for the
answer of an earlier one and then pauses. Where a replay has answers, in batches, they decide when the next turn comes;
`timestamp_ms` is what came out with the answers' own times, and the order of a serial replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from kvjax.replay.requests.trace import TraceRequest

USER_GAP_S = 7.0  # between the beginnings of the first sessions
SESSION_GAP_S = 5.0  # between two sessions of a user
ANSWER_TOKENS_PER_S = 50.0  # where a file does not tell how long answers took


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    input_length: int  # tokens
    output_length: int  # tokens
    hash_ids: tuple[int, ...]
    answer_s: float  # how long its answer takes
    after: int  # earlier turn of the session whose answer it waits for; -1: the session's first
    pause_s: float  # from that answer on


class _Session:
    """A session that a user runs."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.turns = turns
        self.num_left = len(turns)
        self.last = (0.0, -1)  # the answer that ends last: when, its request's place
        self._following: dict[int, list[int]] = {}
        for number, turn in enumerate(turns):
            self._following.setdefault(turn.after, []).append(number)

    def following(self, number: int) -> list[int]:
        """Turns that wait for the answer of this one."""
        return self._following.get(number, [])


def at_once(
    sessions: Iterator[Sequence[Turn]], users: int, hash_block_size: int, limit: int | None
) -> list[TraceRequest]:
    """The first `limit` requests, in order of time, of `users` users who take the sessions one by one."""
    requests: list[TraceRequest] = []
    coming: list[tuple[float, int, _Session | None, int, int, float]] = []  # heap: when, tie; what comes, see below
    ties = count()

    def come(session: _Session | None, number: int, answered_s: float, after: int, pause_s: float) -> None:
        """A turn so long after an answer; without a session the first turn of the next one."""
        heappush(coming, (answered_s + pause_s, next(ties), session, number, after, pause_s))

    for user in range(users):
        come(None, 0, user * USER_GAP_S, -1, 0.0)
    while coming and (limit is None or len(requests) < limit):
        time_s, _, session, number, after, pause_s = heappop(coming)
        if session is None:
            turns = next(sessions, None)
            if turns is None:
                continue
            session = _Session(turns)
        turn, place, answered_s = session.turns[number], len(requests), time_s + session.turns[number].answer_s
        requests.append(
            TraceRequest(
                round(1e3 * time_s),
                turn.input_length,
                turn.output_length,
                turn.hash_ids,
                hash_block_size,
                after,
                round(1e3 * pause_s),
            )
        )
        for later in session.following(number):
            come(session, later, answered_s, place, session.turns[later].pause_s)
        session.last = max(session.last, (answered_s, place))
        session.num_left -= 1
        if not session.num_left:
            come(None, 0, *session.last, SESSION_GAP_S)
    return requests


__all__ = ["ANSWER_TOKENS_PER_S", "Turn", "at_once"]
