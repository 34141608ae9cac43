"""Sessions of agents: ids that count within a session, waits for answers, pauses for thinking."""

from __future__ import annotations

import gzip
import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from kvjax.errors import TraceError
from kvjax.replay import ReplayConfig, TraceReading, TraceRequest, read_trace, run_replay
from tests.replay.readers.forms import agent_sessions, lines_of
from tests.replay.readers.laws import check_trace, num_shared, read, shared_tokens
from tests.replay.test_serial import MOONCAKE, full

AGENTS = MOONCAKE.with_name("agents.jsonl.gz")
REQUEST = {"t": 0.0, "in": 130, "out": 2, "runs": [[5, 2]]}


def with_lists(sessions: list[dict], **changes) -> list[dict]:
    """As their authors write them: a list of ids, other names of times."""
    found = []
    for session in sessions:
        requests = [dict(request) for request in session["requests"]]
        for request in requests:
            request["hash_ids"] = [first + i for first, count in request.pop("runs") for i in range(count)]
            request["api_time"], request["think_time"] = request.pop("api"), request.pop("think")
        found.append(session | {"requests": requests} | changes)
    return found


def of_trace(requests: list[TraceRequest]) -> dict[tuple[int, int], TraceRequest]:
    """By session and place in it."""
    return {divmod(request.output_length, 20): request for request in requests}


@pytest.mark.parametrize("scope", ["local", "global"])
@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("seed", range(20))
def test_prompts_share_the_tokens_of_equal_ids_in_their_scope(seed: int, size: int, scope: str, tmp_path: Path) -> None:
    sessions = agent_sessions(np.random.default_rng(seed), size=size)
    requests, told = read(tmp_path / "t", lines_of(with_lists(sessions, hash_id_scope=scope)), users=2)
    if scope == "local":
        assert requests == read(tmp_path / "t", lines_of(sessions), users=2)[0]
    assert f"hash blocks of {size} tokens" in told
    check_trace(requests)
    found = of_trace(requests)
    assert len(found) == len(requests) == sum(len(session["requests"]) for session in sessions)
    for (a, one), (b, other) in combinations(found.items(), 2):
        row_a, row_b = sessions[a[0]]["requests"][a[1]], sessions[b[0]]["requests"][b[1]]
        ids_a, ids_b = ([run[0] for run in row["runs"]] for row in (row_a, row_b))
        in_scope = a[0] == b[0] or scope == "global"
        assert (one.input_length, other.input_length) == (row_a["in"], row_b["in"])
        assert shared_tokens(one, other) == (size * num_shared(ids_a, ids_b) if in_scope else 0)


@pytest.mark.parametrize("seed", range(20))
def test_requests_wait_for_their_agents_answer(seed: int, tmp_path: Path) -> None:
    """An agent's first waits for the session's request before, as long as it did; nobody waits above ten minutes."""
    sessions = agent_sessions(np.random.default_rng(seed))
    sessions[0]["requests"][-1]["think"] = 4_000.0
    requests, told = read(tmp_path / "t", lines_of(sessions), users=3)
    assert "3 users at once; " in told
    for (number, place), request in of_trace(requests).items():
        if place == 0:
            continue
        rows = sessions[number]["requests"]
        same = [i for i in range(place) if rows[i]["agent"] == rows[place]["agent"]]
        before = same[-1] if same else place - 1
        waited = rows[place]["t"] - rows[before]["t"] - rows[before]["api"]
        pause_s = min(rows[place]["think"] if same else max(waited, 0), 600)
        assert divmod(requests[request.after].output_length, 20) == (number, before)
        assert request.pause_ms == pytest.approx(1e3 * pause_s, abs=1)


@pytest.mark.parametrize("seed", range(20))
def test_sub_agents_may_be_lists_among_requests(seed: int, tmp_path: Path) -> None:
    """Whose times count from their `t`: as their authors write them."""
    flat = agent_sessions(np.random.default_rng(seed))
    nested = []
    for session in flat:
        for place, request in enumerate(session["requests"]):
            request["t"] = 10.0 * place
        own = [request for request in session["requests"] if request["agent"] is None]
        inner = [request for request in session["requests"] if request["agent"] is not None]
        entries = [{name: value for name, value in request.items() if name != "agent"} for request in own]
        if inner:
            start_s = inner[0]["t"]
            of_agent = [request | {"t": request["t"] - start_s} for request in inner]
            entries.append({"t": start_s, "type": "subagent", "agent_id": "agent_001", "requests": of_agent})
        nested.append(session | {"requests": entries})
    assert read(tmp_path / "t", lines_of(nested))[0] == read(tmp_path / "t", lines_of(flat))[0]


def test_times_that_a_file_lacks_are_told_by_the_others(tmp_path: Path) -> None:
    """Answers take 20 ms a token; the rest of the time to the next request is the pause."""
    rows = [REQUEST | {"t": 0.0, "out": 100}, REQUEST | {"t": 7.0}]
    requests, _ = read(tmp_path / "t", lines_of([{"block_size": 64, "requests": rows}]))
    assert [(one.timestamp_ms, one.after, one.pause_ms) for one in requests] == [(0, -1, 0), (7_000, 0, 5_000)]


def test_requests_are_taken_by_time(tmp_path: Path) -> None:
    rows = [REQUEST | {"t": time, "out": int(time)} for time in (9.0, 0.0, 4.0)]
    requests, _ = read(tmp_path / "t", lines_of([{"block_size": 64, "requests": rows}]))
    assert [request.output_length for request in requests] == [0, 4, 9]


@pytest.mark.parametrize(
    ("session", "message"),
    [
        ({"requests": [REQUEST]}, "t:2: expected the key 'block_size'"),
        ({"block_size": 0, "requests": [REQUEST]}, "t:2: expected block_size to be an integer >= 1, got 0"),
        ({"block_size": 32, "requests": [REQUEST]}, "t:2: expected block_size 64 as before, got 32"),
        ({"requests": []}, "t:2: expected requests to be a list of objects, at least one, got ..$"),
        ({"requests": [5]}, "t:2: expected requests to be a list of objects"),
        ({"requests": [REQUEST | {"in": -1}]}, "t:2, request 0: expected in to be an integer >= 1, got -1"),
        ({"requests": [REQUEST, {"t": 1.0}]}, "t:2, request 1: expected the key 'in', got .'agent', 't'."),
        ({"requests": [REQUEST | {"t": "x"}]}, "t:2, request 0: expected t to be a number"),
        ({"requests": [REQUEST | {"api": -1}]}, "t:2, request 0: expected api to be a number"),
        (
            {"requests": [REQUEST | {"runs": [[5, 10**12]]}]},
            "t:2, request 0: expected runs as .* 3 in all, got",
        ),
        ({"requests": [REQUEST | {"runs": [[5, 2, 1]]}]}, "t:2, request 0: expected runs as .first id"),
        ({"requests": [REQUEST | {"runs": [[-5, 2]]}]}, "t:2, request 0: expected runs as .first id"),
        ({"requests": [REQUEST | {"runs": None}]}, "t:2, request 0: expected runs as .first id"),
        ({"requests": [REQUEST | {"runs": [[5, 1]]}]}, "t:2, request 0: expected 3 hash_ids for 130 tokens .* got 1"),
        ({"requests": [{"t": 0, "in": 1, "out": 1}]}, "t:2, request 0: expected runs as .first id"),
    ],
)
def test_bad_sessions_are_refused_with_their_line(session: dict, message: str, tmp_path: Path) -> None:
    good = {"block_size": 64, "requests": [REQUEST]}
    bad = session if set(session) != {"requests"} or "block_size" in message else {"block_size": 64, **session}
    with pytest.raises(TraceError, match=message):
        read(tmp_path / "t", lines_of([good, bad]))


@pytest.mark.skipif(not AGENTS.is_file(), reason="the agents' trace is not beside the checkout")
def test_the_recorded_sessions_are_read_whole() -> None:
    requests = read_trace(AGENTS, 500, TraceReading(users=8))
    check_trace(requests)
    with gzip.open(AGENTS, "rt") as lines:
        first = json.loads(next(lines))["requests"]
    assert requests[0].input_length == first[0]["in"]


@pytest.mark.skipif(not AGENTS.is_file(), reason="the agents' trace is not beside the checkout")
@pytest.mark.parametrize("serial", [True, False])
def test_the_recorded_sessions_run(serial: bool) -> None:
    trace = read_trace(AGENTS, 60, TraceReading(users=8))
    recorder = run_replay(trace, ReplayConfig(full(64), num_blocks=20_000, serial=serial)).recorder
    assert recorder.requests == 60
    assert recorder.prompt_tokens == sum(request.input_length for request in trace)
    assert 0.5 < recorder.hit_tokens / recorder.prompt_tokens < 1
