"""Why prompts of a trace missed: against the infinite cache, which has everything that was ever evicted."""

from __future__ import annotations

import pytest

from kvjax.core import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MissReason,
    SlidingWindowSpec,
)
from kvjax.core.misses.lookup_report import LookupReport
from kvjax.core.watch.evicted_blocks import EvictedBlock
from kvjax.planning import Load
from kvjax.replay import ReplayConfig, ReplayResult, SpeedModel, generate_workload, result_json, result_text, run_replay
from kvjax.replay.misses import MissCounts

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype="float32")

WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=16, dtype="float32", sliding_window=64)


def replay(
    seed: int, num_blocks: int, specs: dict[str, KVCacheSpec] | None = None, num_requests: int = 150, **options: object
) -> ReplayResult:
    trace = generate_workload("chat", num_requests, seed)
    config = ReplayConfig(specs or {"layer": SPEC}, num_blocks, explain_misses=True, **options)  # type: ignore[arg-type]
    return run_replay(trace, config)


@pytest.mark.parametrize("policy", ["lru", "slru", "cost", "belady"])
def test_what_the_infinite_cache_hits_besides_was_evicted(policy: str) -> None:
    for seed in range(2):
        result = replay(seed, 800, serial=True, eviction_policy=policy)
        recorder = result.recorder
        assert recorder.refused == 0
        tokens = result.misses.tokens
        assert recorder.hit_tokens + tokens.total() == recorder.prompt_tokens
        assert tokens[MissReason.EVICTED] == recorder.infinite_hit_tokens - recorder.hit_tokens > 0
        assert len(result.misses.evicted_seconds_ago) == len(result.misses.evicted_blocks_ago) > 0


FORGETFUL = {
    "window": WINDOW,
    "chunk": ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype="float32", attention_chunk_size=96
    ),
    "state": MambaSpec(block_size=16, shapes=((16, 16),), dtypes=("float32",), mamba_cache_mode="align"),
}


@pytest.mark.parametrize(
    "kinds", [("full", kind) for kind in FORGETFUL] + [("window",), ("state",), ("window", "state")]
)
@pytest.mark.parametrize("options", [{"retention_interval": 0}, {}, {"retention_interval": "auto"}], ids=str)
def test_what_the_infinite_cache_hits_besides_lacks_a_checkpoint_or_was_evicted(
    kinds: tuple[str, ...], options: dict[str, object]
) -> None:
    """Of kinds that forget: windows, chunks and states, beside full layers and without."""
    specs = {kind: {"full": SPEC, **FORGETFUL}[kind] for kind in kinds}
    for policy in ("lru", "probation"):
        num_blocks = 500 if "full" in kinds else 260
        result = replay(3, num_blocks, specs, 60, serial=True, eviction_policy=policy, **options)
        recorder = result.recorder
        assert recorder.refused == 0
        tokens = result.misses.tokens
        lost = tokens[MissReason.NO_CHECKPOINT] + tokens[MissReason.CHECKPOINT_EVICTED] + tokens[MissReason.EVICTED]
        assert recorder.hit_tokens + tokens.total() == recorder.prompt_tokens
        assert lost == recorder.infinite_hit_tokens - recorder.hit_tokens
        assert lost or "full" not in kinds


def test_lookups_that_lack_evicted_blocks_count_when_these_went() -> None:
    """In seconds and in evictions, as the lookup says them; a lookup that lacks none counts neither."""
    gone = EvictedBlock(was_reused=False, num_evicted_since=7, seconds_since=2.5)
    evicted = LookupReport("a", 32, 0, {MissReason.EVICTED: 16, MissReason.NEVER_SEEN: 16}, evicted=gone)
    counts = MissCounts.of([evicted, LookupReport("b", 32, 0, {MissReason.NEVER_SEEN: 32})])
    assert (counts.evicted_seconds_ago, counts.evicted_blocks_ago) == ([2.5], [7])


def test_what_is_evicted_too_long_ago_counts_as_never_seen() -> None:
    known = replay(0, 1_500, serial=True).misses
    longest_ago = max(known.evicted_blocks_ago)
    forgetful = replay(0, 1_500, serial=True, max_evicted_blocks=longest_ago // 4).misses
    assert 0 < forgetful.tokens[MissReason.EVICTED] < known.tokens[MissReason.EVICTED]
    assert forgetful.tokens.total() == known.tokens.total()
    assert max(forgetful.evicted_blocks_ago) < longest_ago // 4


def test_a_request_counts_once_however_often_it_is_looked_up() -> None:
    result = replay(1, 800, speed=SpeedModel(prefill_tokens_per_s=2_000))
    recorder = result.recorder
    assert recorder.max_waiting > 0
    assert recorder.hit_tokens + result.misses.tokens.total() == recorder.prompt_tokens
    assert "evicted how long ago" in result_text(result)


def test_groups_that_limit_are_counted() -> None:
    """A pool of its own for the window, too small to keep what the full layers keep."""
    trace = generate_workload("chat", 60, 0)
    config = ReplayConfig(
        {"full": SPEC, "window": WINDOW},
        memory_bytes=6 * 2**20,
        load=Load(max(request.input_length for request in trace), max_running=None),
        serial=True,
        explain_misses=True,
    )
    result = run_replay(trace, config)
    assert set(result.misses.tokens_short) == {1}
    assert "1 (sliding_window)" in result_text(result)
    assert result_json(result)["misses"]["tokens_short"] == {"1": result.misses.tokens_short[1]}
