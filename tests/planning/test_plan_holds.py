"""What a plan promises its pools hold: as many requests as it says run to their length, and none is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvjax.core import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheManager,
    MambaSpec,
    MLAAttentionSpec,
    Request,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from kvjax.core.spec import KVCacheSpec
from kvjax.errors import MemoryBudgetError
from kvjax.planning import CacheShape, KVCachePlan, Parallelism, plan_kv_cache
from kvjax.planning.sizing import least_bytes
from kvjax.planning.slabs import common_columns

STEP_TOKENS = 32
HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 8, "dtype": "bfloat16"}
LATENT: dict[str, Any] = {"head_size": 16, "dtype": "bfloat16"}
KINDS: tuple[KVCacheSpec, ...] = (
    FullAttentionSpec(block_size=8, **HEADS),
    FullAttentionSpec(block_size=4, **HEADS | {"num_kv_heads": 1}),
    SlidingWindowSpec(block_size=8, sliding_window=20, **HEADS),
    SlidingWindowSpec(block_size=4, sliding_window=7, **HEADS | {"num_kv_heads": 1}),
    ChunkedLocalAttentionSpec(block_size=8, attention_chunk_size=24, **HEADS),
    SinkFullAttentionSpec(block_size=8, sink_len=16, **HEADS),
    CrossAttentionSpec(block_size=8, max_num_encoder_tokens=30, **HEADS),
    MLAAttentionSpec(block_size=16, tokens_per_state=4, **LATENT),
    SlidingWindowMLASpec(block_size=4, sliding_window=8, **LATENT),
    MambaSpec(block_size=16, shapes=((4, 8),), dtypes=("float32",), mamba_cache_mode="align"),
    MambaSpec(block_size=16, shapes=((4, 8),), dtypes=("float32",)),
)
# Two modes of one recurrent layout, and two kinds that reserve, are not mixed in one model.
MODELS = [
    tuple(KINDS[i] for i in np.random.default_rng(seed).permutation(len(KINDS) - 1)[: 1 + seed % 4])
    for seed in range(24)
]
MODELS.append((KINDS[-1], KINDS[0]))
FIRST_AND_WINDOW = SlidingWindowSpec(block_size=8, sliding_window=20, num_sink_tokens=11, **HEADS)
MODELS += [(FIRST_AND_WINDOW,), (FIRST_AND_WINDOW, KINDS[0], KINDS[3])]
RSWA = RSWASpec(block_size=8, rswa_window=20, **HEADS)
MODELS += [(RSWA,), (RSWA, KINDS[0], KINDS[3])]


def names_of(kinds: tuple[KVCacheSpec, ...]) -> str:
    return "-".join(spec.kind for spec in kinds)


def specs_of(kinds: tuple[KVCacheSpec, ...]) -> dict[str, KVCacheSpec]:
    """Three layers of each kind."""
    return {f"{name}.{i}": spec for name, spec in zip("abcdefgh", kinds, strict=False) for i in range(3)}


def manager_of(plan: KVCachePlan, kinds: tuple[KVCacheSpec, ...]) -> KVCacheManager:
    hash_block_size = int(np.gcd.reduce([spec.block_size for spec in kinds]))
    return KVCacheManager(plan.config, 200, hash_block_size, max_in_flight_tokens=STEP_TOKENS)


def planned(kinds: tuple[KVCacheSpec, ...], request_len: int) -> KVCachePlan:
    """Three layers of each kind, and memory for about four longest requests."""
    specs = specs_of(kinds)
    least = least_bytes(CacheShape.of(specs, platform="cpu", parallel=Parallelism()).needs(200, 200, STEP_TOKENS))
    return plan_kv_cache(
        specs, memory_bytes=3 * least, max_model_len=200, request_len=request_len, max_in_flight_tokens=STEP_TOKENS
    )


def run_together(manager: KVCacheManager, num_requests: int, length: int, rng: np.random.Generator) -> None:
    """Continuous batching: running requests first, a new one as soon as tokens of the step are left, no preemption."""
    encoder = 30 if manager.groups.reads_encoder else 0
    waiting = [Request(f"r{i}", rng.integers(0, 9, int(rng.integers(1, length))).tolist()) for i in range(num_requests)]
    running: list[Request] = []
    while waiting or any(request.num_computed_tokens < length for request in running):
        manager.new_step_starts()
        budget = STEP_TOKENS
        for request in [*running, *waiting]:
            new = min(request.num_tokens - request.num_computed_tokens, budget)
            new = manager.limit_step(request, new) if new else 0
            if not new or request.num_computed_tokens >= length:
                continue
            first = request in waiting
            got = manager.allocate_slots(request, new, num_encoder_tokens=encoder if first else 0)
            assert got is not None, f"{request} of {num_requests} does not fit"
            request.num_computed_tokens += new
            budget -= new
            if first:
                waiting.remove(request)
                running.append(request)
            if request.num_computed_tokens == request.num_tokens < length:
                request.append_output_token_ids(int(rng.integers(0, 9)))
        manager.check_invariants()


@pytest.mark.parametrize("kinds", MODELS, ids=names_of)
@pytest.mark.parametrize("request_len", [200, 60])
def test_as_many_requests_as_planned_run_to_their_length(kinds: tuple[KVCacheSpec, ...], request_len: int) -> None:
    plan = planned(kinds, request_len)
    num_requests = min(int(plan.requests_of(request_len)), STEP_TOKENS)
    assert num_requests >= 1
    run_together(manager_of(plan, kinds), num_requests, request_len, np.random.default_rng(0))


@pytest.mark.parametrize("kinds", MODELS, ids=names_of)
def test_the_fewest_blocks_that_are_accepted_hold_one_longest_request(kinds: tuple[KVCacheSpec, ...]) -> None:
    """And every pool needs them all: with one block less of any the plan is refused."""
    specs = specs_of(kinds)
    needs = CacheShape.of(specs, platform="cpu", parallel=Parallelism()).needs(200, 200, STEP_TOKENS)
    least = [need.least_blocks for need in needs]
    arguments: dict[str, Any] = {"max_model_len": 200, "max_in_flight_tokens": STEP_TOKENS}
    plan = plan_kv_cache(specs, num_blocks=least, **arguments)
    assert plan.concurrency >= 1
    run_together(manager_of(plan, kinds), 1, 200, np.random.default_rng(0))
    for pool_id in range(len(least)):
        fewer = [size - (i == pool_id) for i, size in enumerate(least)]
        words = rf"of pool {pool_id} .*: 1 block short" if fewer[pool_id] > 1 else "expected num_blocks >= 2"
        with pytest.raises(ValueError, match=words):
            plan_kv_cache(specs, num_blocks=fewer, **arguments)


@pytest.mark.parametrize("kinds", [k for k in MODELS if common_columns(specs_of(k), "cpu", True)], ids=names_of)
@pytest.mark.parametrize("request_len", [200, 60])
def test_as_many_as_planned_run_in_one_memory(kinds: tuple[KVCacheSpec, ...], request_len: int) -> None:
    """In the fewest slabs that are accepted one longest request, in more of them as many as planned."""
    specs = specs_of(kinds)
    arguments: dict[str, Any] = {"max_model_len": 200, "max_in_flight_tokens": STEP_TOKENS, "one_memory": True}
    plan = plan_kv_cache(specs, memory_bytes=1 << 30, **arguments)
    assert plan.slabs is not None
    needs = plan.shape.needs(200, 200, STEP_TOKENS)
    least = plan.slabs.least_slabs(needs) * plan.slabs.bytes_per_slab
    with pytest.raises(MemoryBudgetError, match=r"slabs of .*: 1 bytes short"):
        plan_kv_cache(specs, memory_bytes=least - 1, **arguments)
    smallest = manager_of(plan_kv_cache(specs, memory_bytes=least, **arguments), kinds)
    run_together(smallest, 1, 200, np.random.default_rng(0))
    plan = plan_kv_cache(specs, memory_bytes=3 * least, **arguments)
    num_requests = min(int(plan.requests_of(request_len)), STEP_TOKENS)
    assert num_requests >= 1
    run_together(manager_of(plan, kinds), num_requests, request_len, np.random.default_rng(0))
