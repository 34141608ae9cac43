"""Laws of a replay over several replicas with tiers: one is a replay, a shared disk finds what others do and more."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvjax.replay import (
    BatchingConfig,
    FleetResult,
    ReplayConfig,
    ReplayTierConfig,
    TraceRequest,
    fleet_json,
    fleet_text,
    run_fleet,
    run_replay,
)
from kvjax.routing import PrefixAwareRouter, ReplicaState
from tests.replay.random_traces import random_trace
from tests.replay.replicas.test_fleet import conversations, hits
from tests.replay.test_serial import full

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from random_calls import chunked, window
from random_calls import full as one_full
from random_calls import recurrent as state

TIERS = ReplayTierConfig(host_blocks=100, disk_bytes=1 << 40)
CONFIG = ReplayConfig(
    full(16),
    num_blocks=230,
    batching=BatchingConfig(max_num_batched_tokens=256, max_num_seqs=8),
    hash_algorithm="xxhash_cbor",
    tiers=TIERS,
)


def spaced(trace: list[TraceRequest]) -> list[TraceRequest]:
    """One at a time: each request ends long before the next comes."""
    return [replace(request, timestamp_ms=60_000 * place) for place, request in enumerate(trace)]


def check_nothing_is_left(result: FleetResult) -> None:
    for recorder in result.recorders:
        for pool in recorder.pools:
            pool.check_invariants()
            assert pool.num_free_blocks == pool.num_blocks - 1


@pytest.mark.parametrize("tick_ms", [1, 20_000])
@pytest.mark.parametrize(("write_through", "shares_disk"), [(False, True), (True, False)])
def test_one_replica_is_a_replay(write_through: bool, shares_disk: bool, tick_ms: int) -> None:
    """Whether requests come one by one, or several at one time to a replica that is idle."""
    tiers = replace(TIERS, write_through=write_through, shares_disk=shares_disk)
    trace = [replace(one, timestamp_ms=one.timestamp_ms // 300 * tick_ms) for one in random_trace(2, 20, max_output=10)]
    config = replace(CONFIG, tiers=tiers)
    fleet, alone = run_fleet(trace, config, 1, "prefix"), run_replay(trace, config)
    (recorder,), (stats,) = fleet.recorders, fleet.tier_stats
    for name in ("hits", "ttft_s", "second_token_s", "token_gap_s", "latency_s", "computed_tokens", "preemptions"):
        assert getattr(recorder, name) == getattr(alone.recorder, name), name
    assert stats == alone.tier_stats
    assert stats.num_host_loads > 0
    assert fleet.virtual_seconds == alone.virtual_seconds


@pytest.mark.parametrize("router", ["round_robin", "prefix"])
@pytest.mark.parametrize("shares_disk", [False, True])
def test_every_request_ends_with_all_its_tokens(shares_disk: bool, router: str) -> None:
    """Prompt tokens are hits or computed, each once where nothing is preempted; equal runs are equal."""
    trace = random_trace(1, 20, max_output=10)
    config = replace(CONFIG, num_blocks=400, tiers=replace(TIERS, shares_disk=shares_disk))
    result, again = run_fleet(trace, config, 3, router), run_fleet(trace, config, 3, router)
    recorders = result.recorders
    assert result.is_complete
    assert sum(recorder.requests for recorder in recorders) == len(trace)
    assert sum(recorder.output_tokens for recorder in recorders) == sum(one.output_length for one in trace)
    assert not sum(recorder.preemptions for recorder in recorders)
    prompts = sum(one.input_length for one in trace)
    decoded = sum(max(one.output_length - 1, 0) for one in trace)
    assert sum(recorder.computed_tokens for recorder in recorders) == prompts - hits(result) + decoded
    check_nothing_is_left(result)
    assert [one.ttft_s for one in again.recorders] == [one.ttft_s for one in recorders]
    assert again.tier_stats == result.tier_stats


@pytest.mark.parametrize("seed", range(3))
def test_a_shared_disk_finds_what_disks_of_their_own_find_and_more(seed: int) -> None:
    """Request by request where they come one at a time and no disk is full: it holds what each of them would."""
    trace = spaced(random_trace(seed, 30, max_output=10))
    found = []
    for shares_disk in (False, True):
        config = replace(CONFIG, tiers=replace(TIERS, host_blocks=0, shares_disk=shares_disk))
        result = run_fleet(trace, config, 3, "round_robin")
        found.append([hit for recorder in result.recorders for _, hit in recorder.hits])
    assert all(shared >= own for own, shared in zip(*found, strict=True))
    assert sum(found[1]) > sum(found[0])


def test_tiers_add_to_the_hits_of_pools() -> None:
    trace = spaced(random_trace(5, 30, max_output=10))
    pools = run_fleet(trace, replace(CONFIG, tiers=None), 2, "prefix")
    assert pools.tier_stats == ()
    assert hits(run_fleet(trace, CONFIG, 2, "prefix")) > hits(pools)


def test_a_shared_disk_has_one_bandwidth() -> None:
    """Two replicas that read at one time wait for one another; with disks of their own they do not."""
    turns = conversations(4, 3)
    trace = spaced(turns[:8]) + [replace(one, timestamp_ms=600_000) for one in turns[8:10]]
    slow = replace(TIERS, host_blocks=0, disk_bytes_per_s=1e5)
    seconds = {}
    for shares_disk in (False, True):
        tiers = replace(slow, shares_disk=shares_disk)
        result = run_fleet(trace, replace(CONFIG, num_blocks=210, tiers=tiers), 2, "round_robin")
        assert [stats.num_disk_loads > 0 for stats in result.tier_stats] == [True, True]
        seconds[shares_disk] = [recorder.ttft_s[-1] for recorder in result.recorders]
    assert seconds[True][0] == seconds[False][0]
    assert seconds[True][1] > 1.5 * seconds[False][1]


def test_a_router_knows_what_the_tiers_of_a_replica_hold() -> None:
    """A conversation whose blocks a pool has evicted comes back to the replica whose host has them."""
    trace = spaced(conversations(3, 2))
    config = replace(CONFIG, num_blocks=130, tiers=ReplayTierConfig(host_blocks=1_000))
    result = run_fleet(trace, config, 2, "prefix")
    assert hits(result) == sum(recorder.infinite_hit_tokens for recorder in result.recorders) > 0


def test_the_report_counts_loads() -> None:
    config = replace(CONFIG, tiers=replace(TIERS, shares_disk=True))
    result = run_fleet(spaced(random_trace(5, 20, max_output=10)), config, 2, "prefix")
    values = fleet_json(result)
    assert values["tiers"]["shares_disk"] is True
    assert values["tiers"]["loaded_tokens"] == sum(stats.num_loaded_tokens for stats in result.tier_stats) > 0
    assert 0 < values["busy"] < 1
    assert "one disk for all" in fleet_text([result])


KINDS = {
    "window first": [window(16, 600), window(16, 600), one_full(16)],
    "chunks": [one_full(16), chunked(16, 1_024)],
    "two windows, two block sizes": [window(16, 300), one_full(32), window(32, 900)],
    "states": [one_full(16), state(16), state(16)],
}


@pytest.mark.parametrize("tiers", [None, ReplayTierConfig(host_blocks=200)], ids=["pools", "tiers"])
@pytest.mark.parametrize("name", KINDS)
def test_a_router_is_told_the_hits_that_follow(
    name: str, tiers: ReplayTierConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request at a time: what the index promises of the chosen replica is what the request finds there."""
    told, pick = Counter(), PrefixAwareRouter.pick

    def picked(self: PrefixAwareRouter, num_prompt_tokens: int, replicas: Sequence[ReplicaState]) -> int:
        chosen = pick(self, num_prompt_tokens, replicas)
        told[num_prompt_tokens, replicas[chosen].hit_tokens] += 1
        return chosen

    monkeypatch.setattr(PrefixAwareRouter, "pick", picked)
    trace = spaced(conversations(4, 3) + random_trace(3, 40, max_output=30))
    specs = {f"layers.{i}": spec for i, spec in enumerate(KINDS[name])}
    result = run_fleet(trace, replace(CONFIG, specs=specs, num_blocks=330, tiers=tiers), 2, "prefix")
    assert told == Counter(hit for recorder in result.recorders for hit in recorder.hits)
    assert hits(result) > 0
    assert sum(pool.num_evicted_blocks for recorder in result.recorders for pool in recorder.pools) > 0
