"""Replay with tiers: pool and host together hit what one pool of both sizes hits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.mamba import MambaSpec
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.core.spec import KVCacheSpec
from kvjax.replay import (
    BatchingConfig,
    ReplayConfig,
    ReplayTierConfig,
    SplitConfig,
    TraceRequest,
    TransferConfig,
    generate_workload,
    read_trace,
    run_replay,
    run_split,
)
from kvjax.replay.batching import BatchedReplay
from kvjax.replay.recorder import Recorder
from tests.replay.random_traces import random_trace

MOONCAKE = Path(__file__).parents[4] / "shared" / "traces" / "mooncake_conversation.jsonl"

PROBATION: dict[str, Any] = {"eviction_policy": "probation", "retention_interval": "auto"}


def full(block_size: int) -> dict[str, KVCacheSpec]:
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=128, dtype="bfloat16")
    return {"layers.0": spec}


def assert_hits_of_one_pool(trace: Sequence[TraceRequest], pool: int, host: int) -> None:
    config: dict[str, Any] = {"specs": full(512), "serial": True}
    large = run_replay(trace, ReplayConfig(num_blocks=pool + host, **config)).recorder
    tiers = ReplayTierConfig(host_blocks=host)
    small = run_replay(trace, ReplayConfig(num_blocks=pool, tiers=tiers, **config)).recorder
    alone = run_replay(trace, ReplayConfig(num_blocks=pool, **config)).recorder
    assert small.hits == large.hits
    assert large.hit_tokens > alone.hit_tokens


@pytest.mark.parametrize("kind", ["chat", "agents"])
def test_pool_and_host_hit_what_one_pool_of_both_sizes_hits(kind: str) -> None:
    """Exactly, request by request: what is loaded leaves the host, and both evict in one order."""
    trace = generate_workload(kind, 120, 0)
    longest = max(-(-request.input_length // 512) for request in trace)
    assert_hits_of_one_pool(trace, longest + 2, 9 * (longest + 2))


@pytest.mark.parametrize("kind", ["chat", "agents", "documents"])
def test_windows_in_pool_and_host_hit_what_they_hit_in_one_pool(kind: str) -> None:
    """Probation included. Within two percent: while units are loaded, pool and host both have their bytes."""
    trace = generate_workload(kind, 120, 0)
    window = SlidingWindowSpec(block_size=512, num_kv_heads=1, head_size=128, dtype="bfloat16", sliding_window=1024)
    specs = {f"layers.{i}": window if i % 3 else full(512)["layers.0"] for i in range(6)}
    size = 3 * max(-(-request.input_length // 512) for request in trace) + 4
    config: dict[str, Any] = {"specs": specs, "serial": True, **PROBATION}
    large = run_replay(trace, ReplayConfig(num_blocks=4 * size, **config)).recorder.hit_tokens
    tiers = ReplayTierConfig(host_blocks=3 * size)
    small = run_replay(trace, ReplayConfig(num_blocks=size, tiers=tiers, **config)).recorder.hit_tokens
    alone = run_replay(trace, ReplayConfig(num_blocks=size, **config)).recorder.hit_tokens
    assert small == pytest.approx(large, rel=0.02)
    assert large > 1.2 * alone


def test_tokens_and_states_have_of_the_host_what_they_need() -> None:
    """Eight prompts, and again: 8 of 8 hit in bytes for just their blocks and two states each.

    In proportion to the pools, with as many states as blocks, it was 0 of 8 (SGLang 39436).
    """
    state = MambaSpec(block_size=16, shapes=((256, 256),), dtypes=("float32",), mamba_cache_mode="align")
    specs: dict[str, KVCacheSpec] = {"states": state, **full(16)}
    trace = [TraceRequest(1_000 * i, 1_024, 1, (2 * (i % 8), 2 * (i % 8) + 1)) for i in range(16)]
    tiers = ReplayTierConfig(host_bytes=8 * (64 * specs["layers.0"].page_size_bytes + 2 * state.page_size_bytes))
    config = ReplayConfig(specs, num_blocks=71, serial=True, tiers=tiers, **PROBATION)
    assert [hit for _, hit in run_replay(trace, config).recorder.hits] == [0] * 8 + [1_008] * 8


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the trace is not here")
def test_the_conversation_trace_with_a_pool_of_a_tenth() -> None:
    assert_hits_of_one_pool(read_trace(MOONCAKE, 300), 300, 2_700)


@pytest.mark.parametrize("write_through", [False, True])
def test_batched_replay_with_time_for_transfers(write_through: bool) -> None:
    """Every request ends, and a slower link gives later first tokens for the same trace."""
    trace = generate_workload("chat", 25, 0)
    longest = max(-(-(request.input_length + request.output_length) // 512) for request in trace)
    config: dict[str, Any] = {"specs": full(512), "num_blocks": 3 * longest}
    sizes = {"host_blocks": 20 * longest, "disk_bytes": 1 << 40, "write_through": write_through}
    first_token_s = []
    for speed in (1e12, 1e6):
        tiers = ReplayTierConfig(host_bytes_per_s=speed, disk_bytes_per_s=speed, **sizes)
        result = run_replay(trace, ReplayConfig(tiers=tiers, **config))
        assert result.is_complete
        assert result.recorder.requests == len(trace)
        assert result.tier_stats is not None
        assert result.tier_stats.num_load_failures == 0
        assert result.tier_stats.num_host_loads > 0
        first_token_s.append(sum(result.recorder.ttft_s))
    assert first_token_s[1] > first_token_s[0]


def test_a_load_of_what_is_nowhere_fails_and_its_request_is_computed() -> None:
    """Blocks that a pool evicted are on a slow way to a host that has room for a few of them when they are wanted."""
    trace = [TraceRequest(1_000 * i, 512, 2, (i % 2,)) for i in range(3)]
    tiers = ReplayTierConfig(host_blocks=4, host_bytes_per_s=1e3)
    result = run_replay(trace, ReplayConfig(full(16), num_blocks=41, tiers=tiers))
    assert result.is_complete
    assert result.tier_stats is not None
    assert (result.tier_stats.num_load_failures, result.tier_stats.num_loaded_tokens) == (1, 0)
    recorder = result.recorder
    assert (recorder.requests, len(recorder.ttft_s), recorder.output_tokens) == (3, 3, 6)
    assert recorder.computed_tokens > 2 * 512 + 3
    for pool in recorder.pools:
        pool.check_invariants()
        assert pool.num_free_blocks == pool.num_blocks - 1


def crowded(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Sequence[TraceRequest], ReplayConfig]:
    """A trace, a pool of which each request needs most, and slow links. Each step's scheduler is checked."""
    step = BatchedReplay.step

    def watched(self: BatchedReplay) -> None:
        step(self)
        self.scheduler.check_invariants()

    monkeypatch.setattr(BatchedReplay, "step", watched)
    trace = [replace(one, timestamp_ms=one.timestamp_ms + i) for i, one in enumerate(random_trace(seed, 12, 3, 150))]
    tiers = ReplayTierConfig(host_blocks=2_000, host_bytes_per_s=1e5, disk_bytes=1 << 40)
    batching = BatchingConfig(max_num_batched_tokens=256, max_num_seqs=8)
    config = ReplayConfig(full(16), num_blocks=109, tiers=tiers, batching=batching, hash_algorithm="xxhash_cbor")
    return trace, config


def check_all_ended(recorder: Recorder, trace: Sequence[TraceRequest]) -> None:
    assert (recorder.requests, recorder.refused) == (len(trace), 0)
    for pool in recorder.pools:
        pool.check_invariants()
        assert pool.num_free_blocks == pool.num_blocks - 1


@pytest.mark.parametrize("first_seed", range(0, 20, 5))
def test_the_youngest_gives_way_whether_it_runs_or_loads(first_seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So none is refused that the pool has room for, and all tokens come out."""
    num_preemptions = num_loaded = 0
    for seed in range(first_seed, first_seed + 5):
        trace, config = crowded(seed, monkeypatch)
        result = run_replay(trace, config)
        assert result.tier_stats is not None
        assert result.tier_stats.num_load_failures == 0
        check_all_ended(result.recorder, trace)
        assert result.recorder.output_tokens == sum(one.output_length for one in trace)
        num_preemptions += result.recorder.preemptions
        num_loaded += result.tier_stats.num_loaded_tokens
        monkeypatch.undo()
    assert num_preemptions > 0
    assert num_loaded > 0


@pytest.mark.parametrize("first_seed", range(0, 20, 5))
def test_the_youngest_gives_way_where_prompts_come_from_a_peer(
    first_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_preemptions = 0
    for seed in range(first_seed, first_seed + 5):
        trace, config = crowded(seed, monkeypatch)
        result = run_split(trace, replace(config, tiers=None), SplitConfig(1, 1, TransferConfig(1e6)), "prefix")
        check_all_ended(result.prefill[0], trace)
        check_all_ended(result.decode[0], [one for one in trace if one.output_length > 1])
        num_preemptions += result.decode[0].preemptions
        monkeypatch.undo()
    assert num_preemptions > 0
