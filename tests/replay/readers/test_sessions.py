"""Laws of users at once: each runs one session at a time, and a turn comes after the answer that it waits for."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from kvjax.replay import TraceRequest
from kvjax.replay.readers.sessions import SESSION_GAP_S, USER_GAP_S, Turn, at_once
from tests.replay.readers.laws import check_trace


def random_sessions(seed: int, num_sessions: int = 12) -> list[list[Turn]]:
    """Turns that wait for any earlier one; a turn's length tells its session and its number."""
    rng = np.random.default_rng(seed)
    return [
        [
            Turn(
                input_length=1 + 20 * session + number,
                output_length=1,
                hash_ids=tuple(range(40 * session, 40 * session + (20 * session + number) // 16 + 1)),
                answer_s=float(rng.integers(0, 30)),
                after=int(rng.integers(0, number)) if number else -1,
                pause_s=float(rng.integers(0, 20)),
            )
            for number in range(rng.integers(1, 8))
        ]
        for session in range(num_sessions)
    ]


@pytest.mark.parametrize("users", [1, 3, 50])
@pytest.mark.parametrize("seed", range(20))
def test_turns_wait_for_answers_and_users_for_their_sessions(seed: int, users: int) -> None:
    sessions = random_sessions(seed)
    requests = at_once(iter(sessions), users, 16, None)
    check_trace(requests)
    assert sorted(request.input_length for request in requests) == sorted(
        turn.input_length for turns in sessions for turn in turns
    )
    begun: list[int] = []
    when: dict[tuple[int, int], float] = {}
    for request in requests:
        session, number = session_and_turn(request)
        turn = sessions[session][number]
        start_s = when[session, number] = request.timestamp_ms / 1e3
        before = requests[request.after] if request.after >= 0 else None
        if before is None:
            assert start_s % USER_GAP_S == 0
        else:
            assert start_s == ended(before, sessions) + request.pause_ms / 1e3
        if number:
            assert before is not None
            assert session_and_turn(before) == (session, turn.after)
            assert request.pause_ms == 1e3 * turn.pause_s
        else:
            begun.append(session)
    assert begun == list(range(len(sessions)))  # in the order of the file
    check_one_session_a_user(sessions, when, users)


def session_and_turn(request: TraceRequest) -> tuple[int, int]:
    return divmod(request.input_length - 1, 20)


def ended(request: TraceRequest, sessions: list[list[Turn]]) -> float:
    session, number = session_and_turn(request)
    return request.timestamp_ms / 1e3 + sessions[session][number].answer_s


def check_one_session_a_user(sessions: list[list[Turn]], when: dict[tuple[int, int], float], users: int) -> None:
    """At the beginning of a session there are fewer than `users` others that have begun and not ended."""
    last: dict[int, float] = defaultdict(float)
    for (session, number), time_s in when.items():
        last[session] = max(last[session], time_s + sessions[session][number].answer_s)
    for session in range(len(sessions)):
        start = when[session, 0]
        others = [other for other in range(session) if when[other, 0] <= start < last[other] + SESSION_GAP_S]
        assert len(others) < users


def test_a_limit_takes_the_first() -> None:
    sessions = random_sessions(0)
    everything = at_once(iter(sessions), 3, 16, None)
    for limit in (1, 5, len(everything), 1_000):
        assert at_once(iter(sessions), 3, 16, limit) == everything[:limit]
