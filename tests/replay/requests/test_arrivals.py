"""Requests come at their times, or so long after the answer that they wait for, in every kind of replay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvjax.replay import BatchingConfig, ReplayConfig, SplitConfig, TraceRequest, run_fleet, run_replay, run_split
from kvjax.replay.requests.arrivals import Arrivals
from kvjax.replay.requests.job import Job
from tests.replay.random_traces import random_trace
from tests.replay.test_serial import full

CONFIG = ReplayConfig(
    full(16),
    num_blocks=100,
    batching=BatchingConfig(max_num_batched_tokens=256, max_num_seqs=8),
    hash_algorithm="xxhash_cbor",
)
RUNS = {
    "one": lambda trace: run_replay(trace, CONFIG),
    "fleet": lambda trace: run_fleet(trace, CONFIG, 2, "prefix"),
    "split": lambda trace: run_split(trace, CONFIG, SplitConfig(1, 2), "prefix"),
}


def with_waits(seed: int) -> list[TraceRequest]:
    """Some requests are larger than the cache; some wait for earlier ones."""
    rng = np.random.default_rng(seed)
    return [
        replace(request, after=int(rng.integers(-1, place)) if place else -1, pause_ms=int(rng.integers(0, 3_000)))
        for place, request in enumerate(random_trace(seed, 12, max_blocks=4, max_output=25))
    ]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("seed", range(20))
def test_requests_come_after_the_answers_that_they_wait_for(
    seed: int, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: dict[int, float] = {}
    ended: dict[int, float] = {}
    job_of, job_ended = Job.of, Arrivals.ended

    def note_end(self: Arrivals, job: Job, time_s: float) -> None:
        ended[job.index] = time_s
        job_ended(self, job, time_s)

    def note_coming(index: int, source: TraceRequest, arrives_s: float) -> Job:
        came[index] = arrives_s
        return job_of(index, source, arrives_s)

    monkeypatch.setattr(Arrivals, "ended", note_end)
    monkeypatch.setattr(Job, "of", staticmethod(note_coming))
    trace = with_waits(seed)
    result = RUNS[run](trace)
    assert result.is_complete
    assert set(came) == set(ended) == set(range(len(trace)))
    for place, request in enumerate(trace):
        start = request.timestamp_ms / 1e3
        if request.after >= 0:
            start = ended[request.after] + request.pause_ms / 1e3
        assert came[place] == start
        assert ended[place] >= start


def test_first_tokens_are_timed_from_when_a_request_came() -> None:
    """Two equal requests, the second long after the first's answer: as fast as alone, whatever their timestamps say."""
    first = TraceRequest(0, 600, 3, (0, 1))
    alone = run_replay([first], CONFIG).recorder.ttft_s
    for second_ms in (0, 5, 10**9):
        second = TraceRequest(second_ms, 600, 3, (2, 3), after=0, pause_ms=60_000)
        assert run_replay([first, second], CONFIG).recorder.ttft_s == pytest.approx(2 * alone)


def test_belady_in_batches_needs_an_order_that_is_known() -> None:
    trace = with_waits(0)
    config = replace(CONFIG, eviction_policy="belady")
    assert run_replay(trace, replace(config, serial=True)).is_complete
    with pytest.raises(ValueError, match="expected serial=True for eviction_policy='belady' where requests wait"):
        run_replay(trace, config)
