"""Laws of a replay with prefill and decode apart."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvjax.configs import load_model_config
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.core.manager.kv_cache_manager import KVCacheManager
from kvjax.core.requests.request import Request
from kvjax.planning import plan_kv_cache
from kvjax.replay import (
    BatchingConfig,
    ReplayConfig,
    ReplayTierConfig,
    SplitConfig,
    SplitResult,
    TraceRequest,
    TransferConfig,
    run_fleet,
    run_split,
)
from kvjax.replay.beyond.kv_bytes import kv_bytes
from kvjax.replay.beyond.prefilled_kv import PrefilledKV
from kvjax.replay.recorder import Recorder
from kvjax.replay.virtual_time.clock import VirtualClock
from kvjax.routing import ROUTERS
from kvjax.tiers.units import UnitSizes
from tests.replay.random_traces import random_trace
from tests.replay.replicas.test_fleet_tiers import spaced
from tests.replay.test_serial import full

FREE = TransferConfig(math.inf, 0.0)
CONFIG = ReplayConfig(
    full(16),
    num_blocks=2_000,
    batching=BatchingConfig(max_num_batched_tokens=256, max_num_seqs=8),
    hash_algorithm="xxhash_cbor",
)
TOKEN_BYTES = 2 * 2 * 128 * 2  # two layers, K and V, 128 numbers of 2 bytes


def total(recorders: tuple[Recorder, ...], name: str) -> int:
    return sum(getattr(recorder, name) for recorder in recorders)


def check_tokens(result: SplitResult, trace: list[TraceRequest]) -> None:
    """Every request ends, every token is made once, and no block is held."""
    assert result.is_complete
    going_on = [one for one in trace if one.output_length > 1]
    assert total(result.prefill, "requests") == len(trace)
    assert total(result.decode, "requests") == len(going_on)
    assert total(result.prefill, "output_tokens") == sum(min(one.output_length, 1) for one in trace)
    assert total(result.decode, "output_tokens") == sum(one.output_length - 1 for one in going_on)
    assert sum(len(one.ttft_s) for one in result.prefill) == len(trace)
    assert sum(len(one.second_token_s) for one in result.decode) == len(going_on)
    assert sum(len(one.latency_s) for one in result.prefill + result.decode) == len(trace)
    for recorder in result.prefill + result.decode:
        for pool in recorder.pools:
            pool.check_invariants()
            assert pool.num_free_blocks == pool.num_usable_blocks


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("sides", [(1, 1), (2, 3)])
def test_every_request_ends_with_all_its_tokens(sides: tuple[int, int], router: str) -> None:
    """Each prompt is computed once, by a prefill replica, but for hits; decode replicas get or find all of it."""
    trace = random_trace(1, 25, max_output=20)
    result = run_split(trace, CONFIG, SplitConfig(*sides), router)
    check_tokens(result, trace)
    assert not total(result.prefill + result.decode, "preemptions")
    prompts = sum(one.input_length for one in trace)
    assert total(result.prefill, "computed_tokens") == prompts - total(result.prefill, "hit_tokens")
    assert total(result.decode, "computed_tokens") == total(result.decode, "output_tokens")
    arrived = sum(one.input_length for one in trace if one.output_length > 1)
    assert result.sent_tokens == arrived - total(result.decode, "hit_tokens")
    assert result.sent_bytes == result.sent_tokens * TOKEN_BYTES
    assert total(result.decode, "hit_tokens") > 0


def test_preempted_requests_compute_their_prompts_where_they_decode() -> None:
    trace = [TraceRequest(10 * i, 512, 400, (i,)) for i in range(8)]
    result = run_split(trace, replace(CONFIG, num_blocks=130), SplitConfig(1, 1), "prefix")
    check_tokens(result, trace)
    assert total(result.decode, "preemptions") > 0
    assert total(result.decode, "computed_tokens") > total(result.decode, "output_tokens")
    assert result.num_transfers == len(trace)


@pytest.mark.parametrize("seed", range(3))
def test_hits_are_those_of_one_mixed_replica_where_nothing_is_evicted(seed: int) -> None:
    """Requests one at a time: the prefill side's cache is as good as one that has no decode side."""
    trace = spaced(random_trace(seed, 25, max_output=10))
    config = replace(CONFIG, num_blocks=20_000)
    split = run_split(trace, config, SplitConfig(1, 1, FREE), "prefix")
    mixed = run_fleet(trace, config, 1, "prefix")
    assert split.prefill[0].hits == mixed.recorders[0].hits
    assert split.prefill[0].ttft_s == pytest.approx(mixed.recorders[0].ttft_s)
    assert split.decode[0].second_token_s == pytest.approx(mixed.recorders[0].second_token_s)
    assert split.decode[0].token_gap_s == pytest.approx(mixed.recorders[0].token_gap_s)


def test_the_second_token_waits_for_the_transfer() -> None:
    """By the latency and the bytes over the bandwidth; the first one does not."""
    trace = [TraceRequest(0, 1_000, 3, (0, 1))]
    slow = TransferConfig(bytes_per_s=1e6, latency_s=0.5)
    free, waits = (run_split(trace, CONFIG, SplitConfig(1, 1, link), "prefix") for link in (FREE, slow))
    assert waits.prefill[0].ttft_s == free.prefill[0].ttft_s
    later = 0.5 + 1_000 * TOKEN_BYTES / 1e6
    assert waits.decode[0].second_token_s == pytest.approx([free.decode[0].second_token_s[0] + later])
    assert waits.decode[0].latency_s == pytest.approx([free.decode[0].latency_s[0] + later])


def test_two_senders_share_the_receivers_link() -> None:
    trace = [TraceRequest(0, 1_000, 3, (0, 1)), TraceRequest(0, 1_000, 3, (2, 3))]
    slow = TransferConfig(bytes_per_s=1e6, latency_s=0.0)
    first, second = run_split(trace, CONFIG, SplitConfig(2, 1, slow), "round_robin").decode[0].second_token_s
    assert second - first == pytest.approx(1_000 * TOKEN_BYTES / 1e6, rel=0.01)


def test_what_the_decode_side_has_is_not_sent() -> None:
    trace = spaced([TraceRequest(0, 1_024, 4, (0, 1)), TraceRequest(0, 1_024, 4, (0, 1))])
    result = run_split(trace, CONFIG, SplitConfig(1, 1), "prefix")
    assert (result.num_transfers, result.sent_tokens) == (1, 1_024)
    assert result.decode[0].hits == [(1_024, 0), (1_024, 1_024)]


def test_a_prompt_that_was_all_there_is_never_sent() -> None:
    """Nor when the request is preempted and then finds nothing of it."""
    config = plan_kv_cache(full(16), max_model_len=2_048, num_blocks=300, platform="gpu").config
    manager = KVCacheManager(config, 2_048, 16)
    kv, nothing = PrefilledKV.create(VirtualClock(), FREE, manager), manager.empty_kv_cache_blocks
    for name in ("found", "sent"):
        kv.expect(name, FREE.link())
    found, sent = (Request(name, range(64)) for name in ("found", "sent"))
    assert kv.get_num_new_matched_tokens(found, nothing, 64) == (0, False)
    assert kv.get_num_new_matched_tokens(found, nothing, 0) == (0, False)
    assert kv.get_num_new_matched_tokens(sent, nothing, 0) == (64, True)
    manager.allocate_slots(sent, 0, num_external_computed_tokens=64, delay_cache_blocks=True)
    kv.update_state_after_alloc(sent, nothing, 64)
    assert kv.get_num_new_matched_tokens(sent, nothing, 0) == (0, False)


def test_tiers_are_the_prefill_sides() -> None:
    trace = spaced(random_trace(5, 25, max_output=10))
    tiers = ReplayTierConfig(host_blocks=100, disk_bytes=1 << 40, shares_disk=True)
    config = replace(CONFIG, num_blocks=210)
    alone = run_split(trace, config, SplitConfig(2, 1), "prefix")
    result = run_split(trace, replace(config, tiers=tiers), SplitConfig(2, 1), "prefix")
    check_tokens(result, trace)
    assert len(result.tier_stats) == 2
    assert total(result.prefill, "hit_tokens") > total(alone.prefill, "hit_tokens")
    assert total(result.decode, "hit_tokens") == total(alone.decode, "hit_tokens")


def test_equal_runs_are_equal() -> None:
    trace = random_trace(4, 25, max_output=20)
    first, second = (run_split(trace, CONFIG, SplitConfig(2, 2), "prefix") for _ in range(2))
    assert [one.latency_s for one in first.decode] == [one.latency_s for one in second.decode]
    assert first.sent_bytes == second.sent_bytes


def test_it_stops_between_two_steps() -> None:
    done = 0

    def count(num_finished: int) -> None:
        nonlocal done
        done += num_finished

    trace = random_trace(3, 20, max_output=20)
    result = run_split(trace, CONFIG, SplitConfig(1, 2), "prefix", count, lambda: done >= 5)
    assert not result.is_complete
    assert 5 <= result.num_done == done < 20


def test_a_window_travels_without_what_it_has_released() -> None:
    """Of a window of 64 tokens with 1,000 computed the blocks that token 1,000 sees: those of tokens 937 to 999."""
    window = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=128, dtype="bfloat16", sliding_window=64)
    specs = full(16) | {"layers.1": window}
    config = plan_kv_cache(specs, max_model_len=2_048, num_blocks=300, platform="gpu").config
    manager = KVCacheManager(config, 2_048, 16)
    request = Request("a", range(1_001))
    manager.allocate_slots(request, 0, num_external_computed_tokens=1_000, delay_cache_blocks=True)
    sizes = UnitSizes.of(config)
    token_bytes = sizes.unit_bytes(0) // 16
    assert kv_bytes(manager, sizes, request.row, 0, 1_000) == (1_000 + 1_000 - 928) * token_bytes
    assert kv_bytes(manager, sizes, request.row, 992, 1_000) == 2 * 8 * token_bytes


def test_a_recurrent_state_travels_once() -> None:
    """A prompt of any length sends one state of each recurrent layer, and all tokens of layers with attention."""
    specs = load_model_config("qwen3-next-80b-a3b").kv_cache_specs()
    trace = [TraceRequest(0, length, 3, tuple(range(10 * i, 10 * i + 2))) for i, length in enumerate((600, 1_000))]
    config = ReplayConfig(specs, memory_bytes=8 << 30, hash_algorithm="xxhash_cbor")
    one, other = (run_split([request], config, SplitConfig(1, 1), "prefix") for request in trace)
    check_tokens(one, trace[:1])
    check_tokens(other, trace[1:])
    attention = [spec for spec in specs.values() if spec.state_pages is None]
    token_bytes = sum(spec.page_size_bytes // spec.block_size for spec in attention)
    assert other.sent_bytes - one.sent_bytes == 400 * token_bytes
    assert one.sent_bytes > 600 * token_bytes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SplitConfig(0, 1), "expected replicas on both sides, got 0 and 1"),
        (lambda: TransferConfig(bytes_per_s=0), "expected bytes_per_s > 0, got 0"),
        (lambda: TransferConfig(latency_s=-1), "expected latency_s >= 0, got -1"),
        (lambda: run_split([], CONFIG, SplitConfig(1, 1), "prefix"), "expected a trace of at least one request"),
        (lambda: run_split(random_trace(0, 2), CONFIG, SplitConfig(1, 1), "?"), "expected a router of"),
        (
            lambda: run_split(random_trace(0, 2), replace(CONFIG, serial=True), SplitConfig(1, 1), "prefix"),
            "expected continuous batching",
        ),
    ],
)
def test_bad_input(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
