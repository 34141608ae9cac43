"""Laws of a replay over several replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvjax.replay import BatchingConfig, FleetResult, ReplayConfig, TraceRequest, fleet_json, run_fleet, run_replay
from kvjax.routing import ROUTERS
from tests.replay.random_traces import random_trace
from tests.replay.test_serial import full

CONFIG = ReplayConfig(
    full(16),
    num_blocks=2_000,
    batching=BatchingConfig(max_num_batched_tokens=256, max_num_seqs=8),
    hash_algorithm="xxhash_cbor",
)


def conversations(num: int, turns: int) -> list[TraceRequest]:
    """Each turn repeats the whole conversation before it; turns of all conversations alternate, a second apart."""
    requests = []
    for turn in range(turns):
        for one in range(num):
            ids = tuple(range(one * 100, one * 100 + 2 * (turn + 1)))
            requests.append(TraceRequest(1_000 * len(requests), 512 * len(ids), 4, ids))
    return requests


def hits(result: FleetResult) -> int:
    return sum(recorder.hit_tokens for recorder in result.recorders)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("num_blocks", [210, 2_000])
def test_every_request_ends_with_all_its_tokens(router: str, num_blocks: int) -> None:
    trace = random_trace(1, 40, max_output=60)
    result = run_fleet(trace, replace(CONFIG, num_blocks=num_blocks), 3, router)
    assert result.is_complete
    assert sum(recorder.requests for recorder in result.recorders) == 40
    assert sum(recorder.output_tokens for recorder in result.recorders) == sum(one.output_length for one in trace)
    assert sum(len(recorder.ttft_s) for recorder in result.recorders) == 40
    assert all(recorder.requests for recorder in result.recorders)
    for recorder in result.recorders:
        for pool in recorder.pools:
            pool.check_invariants()
            assert pool.num_free_blocks == pool.num_blocks - 1


@pytest.mark.parametrize("router", ROUTERS)
def test_one_replica_is_a_replay(router: str) -> None:
    trace = random_trace(2, 30, max_output=40)
    fleet, alone = run_fleet(trace, CONFIG, 1, router), run_replay(trace, CONFIG)
    (recorder,) = fleet.recorders
    for name in (
        "hits",
        "ttft_s",
        "latency_s",
        "computed_tokens",
        "output_tokens",
        "infinite_hit_tokens",
        "preemptions",
    ):
        assert getattr(recorder, name) == getattr(alone.recorder, name), name
    assert fleet.virtual_seconds == alone.virtual_seconds


def test_conversations_stay_where_their_prefix_is() -> None:
    """Five conversations over two replicas: round robin sends each back and forth and finds half."""
    trace = conversations(5, 4)
    result = run_fleet(trace, CONFIG, 2, "prefix")
    best = sum(recorder.infinite_hit_tokens for recorder in result.recorders)
    assert hits(result) == best > 0
    assert hits(run_fleet(trace, CONFIG, 2, "round_robin")) <= best / 2


def test_events_of_a_step_under_way_are_not_known() -> None:
    """Twins a millisecond apart, while the first is in its first step: the router spreads them, it knows of no hit."""
    trace = [TraceRequest(0, 1_024, 4, (0, 1)), TraceRequest(1, 1_024, 4, (0, 1))]
    result = run_fleet(trace, CONFIG, 2, "prefix")
    assert [recorder.requests for recorder in result.recorders] == [1, 1]
    later = [trace[0], replace(trace[1], timestamp_ms=60_000)]
    assert [recorder.requests for recorder in run_fleet(later, CONFIG, 2, "prefix").recorders] == [2, 0]


def test_it_stops_between_two_steps() -> None:
    done = 0

    def count(num_finished: int) -> None:
        nonlocal done
        done += num_finished

    result = run_fleet(random_trace(3, 20, max_output=20), CONFIG, 2, "prefix", count, lambda: done >= 5)
    assert not result.is_complete
    assert 5 <= result.num_done == done < 20
    assert fleet_json(result)["interrupted"]


@pytest.mark.parametrize(
    ("changes", "arguments"),
    [
        ({"serial": True}, (2, "prefix")),
        ({"eviction_policy": "belady"}, (2, "prefix")),
        ({}, (0, "prefix")),
        ({}, (2, "?")),
    ],
)
def test_bad_input(changes: dict, arguments: tuple) -> None:
    with pytest.raises(ValueError, match="expected"):
        run_fleet(random_trace(0, 3), replace(CONFIG, **changes), *arguments)
