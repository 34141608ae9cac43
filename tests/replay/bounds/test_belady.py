"""The look-ahead bound: against every possible choice of victims on small traces, and above all other policies."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from kvjax.core.eviction import EVICTION_POLICIES
from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.core.spec import KVCacheSpec
from kvjax.replay import REPLAY_POLICIES, BatchingConfig, ReplayConfig, TraceRequest, run_replay
from kvjax.replay.bounds.belady import LookAhead
from tests.replay.random_traces import random_trace


def specs(block_size: int) -> dict[str, KVCacheSpec]:
    return {"layers.0": FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype="bfloat16")}


def hit_tokens(trace: list[TraceRequest], policy: str, num_blocks: int, block_size: int = 512) -> int:
    """Of so many blocks beside the null block."""
    config = ReplayConfig(specs(block_size), num_blocks=num_blocks + 1, serial=True, eviction_policy=policy)
    return run_replay(trace, config).recorder.hit_tokens


def most_hit_tokens(trace: list[TraceRequest], num_blocks: int) -> int:
    """The best of all ways to choose what stays. A state is the set of cached prefixes; a prefix is its last hash id.

    Before a request is served any of the prefixes that it does not hit may be dropped, as many as it needs room.
    """

    @cache
    def best(number: int, cached: frozenset[int]) -> int:
        if number == len(trace):
            return 0
        request = trace[number]
        num_full, num_all = request.input_length // 512, len(request.hash_ids)
        if num_all > num_blocks:
            return best(number + 1, cached)
        hit = 0
        while hit < (request.input_length - 1) // 512 and request.hash_ids[hit] in cached:
            hit += 1
        others = sorted(cached - set(request.hash_ids[:hit]))
        num_dropped = max(len(others) + num_all - num_blocks, 0)
        return 512 * hit + max(
            best(number + 1, cached - frozenset(dropped) | frozenset(request.hash_ids[:num_full]))
            for dropped in combinations(others, num_dropped)
        )

    return best(0, frozenset())


@pytest.mark.parametrize("num_blocks", [2, 3, 4, 5, 6])
def test_no_choice_of_victims_hits_more(num_blocks: int) -> None:
    for seed in range(12):
        trace = random_trace(seed, 9, max_blocks=3)
        assert hit_tokens(trace, "belady", num_blocks) == most_hit_tokens(trace, num_blocks)


@pytest.mark.parametrize("block_size", [64, 512])
@pytest.mark.parametrize("seed", range(6))
def test_no_policy_hits_more(seed: int, block_size: int) -> None:
    trace = random_trace(seed, 80)
    for num_blocks in (6, 11, 30, 70):
        hits = {
            policy: hit_tokens(trace, policy, num_blocks * 512 // block_size, block_size) for policy in REPLAY_POLICIES
        }
        assert max(hits.values()) == hits["belady"]


def test_it_is_better_than_all_policies_somewhere() -> None:
    trace = random_trace(3, 120)
    hits = {policy: hit_tokens(trace, policy, 12) for policy in REPLAY_POLICIES}
    assert hits["belady"] > max(hits[policy] for policy in EVICTION_POLICIES) > 0


def test_a_cache_of_everything_hits_what_the_infinite_one_does() -> None:
    trace = random_trace(0, 60)
    recorder = run_replay(
        trace, ReplayConfig(specs(16), num_blocks=20_000, serial=True, eviction_policy="belady")
    ).recorder
    assert recorder.hit_tokens == recorder.infinite_hit_tokens > 0
    assert recorder.hits[0] == (trace[0].input_length, 0)
    assert sum(hit for _, hit in recorder.hits) == recorder.hit_tokens


@pytest.mark.parametrize("policy", REPLAY_POLICIES)
def test_batches_with_windows_run_to_the_end(policy: str) -> None:
    window = SlidingWindowSpec(block_size=64, num_kv_heads=1, head_size=64, dtype="bfloat16", sliding_window=100)
    batching = BatchingConfig(max_num_batched_tokens=512, max_num_seqs=8)
    trace = random_trace(1, 60, max_output=40)
    config = ReplayConfig(specs(64) | {"layers.1": window}, num_blocks=140, eviction_policy=policy, batching=batching)
    recorder = run_replay(trace, config).recorder
    assert recorder.requests == 60
    assert recorder.output_tokens == sum(request.output_length for request in trace)
    assert recorder.hit_tokens > 0
    for pool in recorder.pools:
        pool.check_invariants()
        assert np.array_equal(np.sort(pool.eviction_policy.order()), np.arange(1, pool.num_blocks))


def test_a_lookahead_counts_only_what_can_be_hit() -> None:
    """The block of a prompt's last token is computed; a request of more blocks than there are is refused."""
    trace = [
        TraceRequest(0, 1024, 0, (0, 1)),
        TraceRequest(0, 1025, 0, (0, 1, 2)),
        TraceRequest(0, 2560, 0, (0, 3, 4, 5, 6)),
    ]
    look_ahead = LookAhead(trace, 256, num_blocks=5)
    hashes = [bytes([i]) for i in range(4)]
    look_ahead.learn(trace[0], hashes)
    assert [look_ahead.next_use(block_hash) for block_hash in hashes] == [0, 0, 0, 1]
    look_ahead.advance()
    assert [look_ahead.next_use(block_hash) for block_hash in hashes] == [1, 1, 1, 1]
    look_ahead.advance()
    assert [look_ahead.next_use(block_hash) for block_hash in [*hashes, b"other", None]] == [look_ahead.never] * 6


def test_block_sizes_that_cut_across_the_traces_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a block size that divides 512, the trace's, to look ahead, got 48"):
        hit_tokens(random_trace(0, 5), "belady", 100, block_size=48)


def test_it_is_not_recorded(tmp_path: Path) -> None:
    config = ReplayConfig(specs(64), num_blocks=100, eviction_policy="belady")
    with pytest.raises(NotImplementedError, match=r"expected eviction_policy of probation, .* to record .*'belady'"):
        run_replay(random_trace(0, 5), config, record_to=tmp_path / "calls")
    assert not (tmp_path / "calls").exists()


def test_it_takes_no_rules_of_a_release() -> None:
    config = ReplayConfig(specs(64), num_blocks=100, serial=True, eviction_policy="belady", release="0.33.0")
    with pytest.raises(ValueError, match=r"expected release=None with eviction_policy='belady', got '0\.33\.0'"):
        run_replay(random_trace(0, 5), config)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected eviction_policy of probation, learned, .*, belady, got 'fifo'"):
        hit_tokens(random_trace(0, 5), "fifo", 100)
