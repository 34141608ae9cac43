"""Laws of the load of a trace: working sets by their definition, and pools that hit as much as the best of many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.core import FullAttentionSpec, MambaSpec
from kvjax.errors import MemoryBudgetError
from kvjax.planning import CacheShape, Load, Parallelism
from kvjax.planning.sizing import bytes_for
from kvjax.replay import ReplayConfig, TraceRequest, generate_workload, run_replay
from kvjax.replay.working_set import MOST_SPARE, WorkingSet, _sizes, load_of

# 2 KiB a token, and 2 MiB a state: as much as 1,024 tokens.
HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16"}
STATE = MambaSpec(block_size=512, shapes=((256, 512),), dtypes=("float32",), mamba_cache_mode="align")
SPECS = {f"full.{i}": FullAttentionSpec(block_size=256, **HEADS) for i in range(4)} | {
    f"state.{i}": STATE for i in range(4)
}

SHAPE = CacheShape.of(SPECS, platform="cpu", parallel=Parallelism())
LENGTHS: dict[str, int] = {"max_model_len": 8_192, "max_in_flight_tokens": 512}


def load(trace: Sequence[TraceRequest], memory_bytes: int, alignment: int = 512, has_answers: bool = True) -> Load:
    options = {"alignment": alignment, "max_running": 1, "has_answers": has_answers}
    return load_of(trace, SHAPE, memory_bytes, **LENGTHS, **options)


@given(uses=st.lists(st.sets(st.integers(0, 5), max_size=4), min_size=1, max_size=12), data=st.data())
def test_sizes_are_means_over_all_spans(uses: list[set[int]], data: st.DataObject) -> None:
    """By definition: the distinct things of n requests, on average over every span that touches the trace's requests.

    Spans begin and end outside too, where nothing is used; their sum over the number of requests is the mean of an
    endless trace of which this is a part. Equal as long as there are fewer than all things.
    """
    sets, count = WorkingSet(), len(uses)
    for request, things in enumerate(uses):
        for thing in things:
            sets.use(thing, request)
    sizes = sets.sizes(count)
    n = data.draw(st.integers(1, count))
    spans = [set().union(*uses[max(end - n, 0) : end]) for end in range(1, count + n)]
    expected = min(sum(map(len, spans)) / count, len(set().union(*uses)))
    assert sizes[n] == pytest.approx(expected)
    assert sizes[0] == 0


def hit_tokens(trace: Sequence[TraceRequest], config: ReplayConfig) -> int:
    return run_replay(trace, config).recorder.hit_tokens


def best_of_splits(trace: Sequence[TraceRequest], config: ReplayConfig) -> int:
    """Most tokens hit of twenty fixed splits of the memory, from a checkpoint for 60 tokens to one for 120,000."""
    return max(hit_tokens(trace, replace(config, load=Load(int(tokens)))) for tokens in np.geomspace(60, 120_000, 20))


@pytest.mark.parametrize(("kind", "gibibytes"), [("chat", 0.15), ("agents", 0.25), ("documents", 0.4)])
def test_the_load_of_a_trace_hits_as_much_as_the_best_of_twenty_splits(kind: str, gibibytes: float) -> None:
    """At least 95 % of it; a split for longest requests hits less."""
    trace = generate_workload(kind, 150, 3)
    config = ReplayConfig(
        SPECS,
        memory_bytes=int(gibibytes * 2**30),
        serial=True,
        platform="cpu",
        hash_algorithm="xxhash_cbor",
        eviction_policy="probation",
        retention_interval="auto",
    )
    hits = hit_tokens(trace, config)
    assert hits >= 0.95 * best_of_splits(trace, config) > 0
    longest = max(request.input_length for request in trace)
    assert hits > hit_tokens(trace, replace(config, load=Load(longest, max_running=None)))


def test_memory_that_holds_no_request_is_named() -> None:
    """The trace's load changes nothing of that."""
    config = ReplayConfig(SPECS, memory_bytes=2**20, serial=True, platform="cpu")
    with pytest.raises(MemoryBudgetError, match="bytes short"):
        run_replay(generate_workload("chat", 3, 0), config)


@pytest.mark.parametrize("num_kept", [3, 5, 8])
def test_a_load_is_paid_to_the_last_byte(num_kept: int) -> None:
    """Two prompts that share nothing: a memory with room for more than both has more checkpoints for their tokens."""
    trace = [TraceRequest(0, 4_096, 0, tuple(range(i, i + 8))) for i in (0, 8)]
    loads = [Load(round(MOST_SPARE * 2 * 4_096 / kept), 1) for kept in (num_kept - 1, num_kept)]
    least = bytes_for(SHAPE.needs_of(loads[1], *LENGTHS.values()), Fraction(num_kept))
    assert load(trace, least) == loads[1]
    assert load(trace, least - 1) == (loads[0] if num_kept > 3 else Load(4_096, 1))


def test_memory_without_end_keeps_every_checkpoint() -> None:
    """More of them than blocks of tokens: a prompt of one and a half blocks, and many answers of half a block."""
    trace = [TraceRequest(0, 1_536, 512, (0, 1, 2))] * 100
    assert load(trace, 2**50, alignment=1_024).tokens_per_checkpoint <= MOST_SPARE * (1_536 + 100 * 512) / 101


@pytest.mark.parametrize("mebibytes", [20, 50, 100, 1_000])
def test_answers_that_are_not_cached_count_for_nothing(mebibytes: int) -> None:
    trace = generate_workload("chat", 50, 3)
    without = [replace(request, output_length=0) for request in trace]
    assert load(trace, mebibytes << 20, has_answers=False) == load(without, mebibytes << 20)


def test_prompts_that_part_in_their_last_block_have_a_checkpoint_each() -> None:
    """Hash blocks of 8 tokens, hits of 3: all share the checkpoint at 6, and none that at 9."""
    trace = [TraceRequest(0, 10, 0, (0, 1 + i), hash_block_size=8) for i in range(50)]
    assert _sizes(trace, alignment=3, has_answers=False)[1][-1] == 51
