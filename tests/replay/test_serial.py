"""Serial replay: against a naive cache, and the published figures of the Mooncake trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.core.spec import KVCacheSpec
from kvjax.replay import ReplayConfig, TraceRequest, read_trace, run_replay
from tests.replay.random_traces import random_trace

MOONCAKE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"


def full(block_size: int, num_layers: int = 2) -> dict[str, KVCacheSpec]:
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=128, dtype="bfloat16")
    return {f"layers.{i}": spec for i in range(num_layers)}


def naive_hits(trace: list[TraceRequest], block_size: int, num_blocks: int) -> tuple[int, int]:
    """Hit tokens and refused requests of a cache of lists: the least recently freed block is reused first.

    A block is an id; `prefix_of` names what it caches; `queue` holds the free ones, oldest first.
    """
    queue = list(range(num_blocks))
    prefix_of: dict[int, bytes] = {}
    hit_tokens = refused = 0
    for request in trace:
        tokens = request.token_ids()
        prefixes = [tokens[: end * block_size].tobytes() for end in range(1, request.input_length // block_size + 1)]
        hits: list[int] = []
        for prefix in prefixes[: (request.input_length - 1) // block_size]:
            found = [block for block, cached in prefix_of.items() if cached == prefix]  # dicts keep insertion order
            if not found:
                break
            hits.append(found[0])
        num_new = -(-request.input_length // block_size) - len(hits)
        if num_new > len(queue) - len(hits):
            refused += 1
            continue
        hit_tokens += len(hits) * block_size
        queue = [block for block in queue if block not in hits]
        new, queue = queue[:num_new], queue[num_new:]
        for block in new:
            prefix_of.pop(block, None)
        prefix_of |= zip(new, prefixes[len(hits) :], strict=False)  # a last block that is not full caches nothing
        queue += reversed(hits + new)
    return hit_tokens, refused


@pytest.mark.parametrize("num_blocks", [3, 5, 8, 20, 60])
@pytest.mark.parametrize("seed", range(4))
def test_agrees_with_a_cache_of_lists(seed: int, num_blocks: int) -> None:
    trace = random_trace(seed, 60)
    config = ReplayConfig(full(512), num_blocks=num_blocks + 1, serial=True, release="0.16.0")
    recorder = run_replay(trace, config).recorder
    assert (recorder.hit_tokens, recorder.refused) == naive_hits(trace, 512, num_blocks)


@pytest.mark.parametrize("seed", range(4))
def test_a_cache_that_never_evicts_hits_what_the_infinite_one_does(seed: int) -> None:
    for block_size in (16, 48, 512):
        trace = random_trace(seed, 60)
        recorder = run_replay(trace, ReplayConfig(full(block_size), num_blocks=20_000, serial=True)).recorder
        assert recorder.hit_tokens == recorder.infinite_hit_tokens > 0
        assert recorder.requests == len(trace)
        assert recorder.prompt_tokens == sum(request.input_length for request in trace)
        assert recorder.computed_tokens == recorder.prompt_tokens - recorder.hit_tokens


def test_windowed_layers_hit_no_more_than_the_infinite_cache() -> None:
    window = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=128, dtype="bfloat16", sliding_window=100)
    specs = full(16) | {f"layers.{i}": window for i in range(2, 12)}
    recorder = run_replay(random_trace(1, 60), ReplayConfig(specs, num_blocks=50_000, serial=True)).recorder
    assert 0 < recorder.hit_tokens <= recorder.infinite_hit_tokens
    assert len(recorder.pools) == 1


def test_a_request_larger_than_the_pool_is_refused_and_changes_nothing() -> None:
    small, large = TraceRequest(0, 512, 1, (0,)), TraceRequest(1, 2048, 1, (0, 1, 2, 3))
    result = run_replay([small, large, small], ReplayConfig(full(512), num_blocks=4, serial=True))
    assert (result.recorder.requests, result.recorder.refused) == (2, 1)
    assert result.recorder.prompt_tokens == 1024


def test_blocks_are_given_with_the_null_block() -> None:
    trace = [TraceRequest(0, 2048, 1, (0, 1, 2, 3))]
    result = run_replay(trace, ReplayConfig(full(512), num_blocks=5, serial=True))
    assert result.recorder.requests == 1
    assert result.plan.pools[0].num_blocks == 5
    assert max(sample.held_blocks for sample in result.recorder.samples) == 4


def test_all_blocks_are_free_again() -> None:
    result = run_replay(random_trace(3, 40), ReplayConfig(full(16), num_blocks=500, serial=True))
    (pool,) = result.recorder.pools
    pool.check_invariants()
    assert pool.num_free_blocks == 499


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a trace of at least one request, got none"):
        run_replay([], ReplayConfig(full(16), num_blocks=10))


@pytest.mark.skipif(not MOONCAKE.is_file(), reason="the Mooncake trace is not beside the checkout")
@pytest.mark.parametrize(
    ("num_blocks", "hit_tokens"),
    [(10_000, 31_217_152), pytest.param(400_000, 54_063_104, marks=pytest.mark.sweep)],  # the second never evicts
)
@pytest.mark.timeout(600)
def test_mooncake_figures(num_blocks: int, hit_tokens: int) -> None:
    """As vLLM's own manager has them, one request at a time."""
    config = ReplayConfig(
        full(512), num_blocks=num_blocks + 1, serial=True, hash_algorithm="xxhash_cbor", release="0.16.0"
    )
    recorder = run_replay(read_trace(MOONCAKE), config).recorder
    assert recorder.requests == 12_031
    assert recorder.prompt_tokens == 144_793_823
    assert recorder.hit_tokens == hit_tokens
    assert recorder.infinite_hit_tokens == 54_063_104
