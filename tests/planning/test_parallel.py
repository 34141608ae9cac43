"""Laws of ranks: every token of every head lies on as many ranks as the plan says, and the bytes are those counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvjax.core import FullAttentionSpec, KVCacheManager, MLAAttentionSpec, Request
from kvjax.core.spec import KVCacheSpec, cdiv
from kvjax.planning import Parallelism, plan_kv_cache
from tests.planning.test_plan import full, layers

LATENT = MLAAttentionSpec(block_size=16, head_size=576, dtype="bfloat16")


def heads_of(spec: KVCacheSpec) -> int:
    return spec.num_kv_heads if isinstance(spec, FullAttentionSpec) else 1


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 100])
@pytest.mark.parametrize(
    ("spec", "parallel"),
    [
        (full(8), Parallelism(tensor=4)),
        (full(2), Parallelism(tensor=8)),
        (full(2), Parallelism(tensor=8, decode_context=2)),
        (full(2), Parallelism(tensor=8, decode_context=4, prefill_context=3)),
        (full(8), Parallelism(tensor=2, prefill_context=2, data=2)),
        (LATENT, Parallelism(tensor=4)),
        (LATENT, Parallelism(tensor=4, decode_context=4, data=3)),
    ],
)
def test_ranks_hold_what_the_plan_counts(spec: KVCacheSpec, parallel: Parallelism, num_tokens: int) -> None:
    """One request, token by token and head by head, against the plan's blocks and bytes of a rank."""
    plan = plan_kv_cache({"a": spec, "b": spec}, num_blocks=500, max_model_len=num_tokens, parallel=parallel)
    places: Counter[tuple[int, int]] = Counter()
    for rank in range(parallel.num_devices):
        share = parallel.share_of(spec, rank)
        if share.replica:
            continue
        tokens = list(range(share.first_token, num_tokens, share.token_stride))
        places.update((token, head) for token in tokens for head in share.heads)
        # Block ids are common: a rank has a page for each, full of its tokens but for the last.
        assert len(tokens) <= plan.pools[0].request_blocks * spec.block_size
        assert plan.groups[0].real_page_bytes * heads_of(spec) == spec.page_size_bytes * len(share.heads)
    copies = parallel.tensor // heads_of(spec) if parallel.tensor > heads_of(spec) else 1
    assert places == {
        (token, head): copies // parallel.decode_context
        for token in range(num_tokens)
        for head in range(heads_of(spec))
    }
    assert plan.pools[0].request_blocks == cdiv(num_tokens, spec.block_size * parallel.context)


def test_replicas_are_ranks_of_their_own() -> None:
    parallel = Parallelism(tensor=2, prefill_context=3, data=4)
    assert parallel.num_devices == 24
    shares = [parallel.share_of(full(2), rank) for rank in range(24)]
    assert Counter(share.replica for share in shares) == dict.fromkeys(range(4), 6)
    assert {(share.replica, share.heads, share.first_token) for share in shares} == {
        (replica, range(head, head + 1), token) for replica in range(4) for head in range(2) for token in range(3)
    }


@pytest.mark.parametrize("context", [1, 2, 4])
def test_a_manager_takes_the_blocks_that_were_planned(context: int) -> None:
    parallel = Parallelism(tensor=4, decode_context=context)
    plan = plan_kv_cache({"a": LATENT}, num_blocks=64, max_model_len=200, parallel=parallel)
    manager = KVCacheManager(plan.config, 200, 16 * context, dcp_world_size=context)
    assert manager.allocate_slots(Request("r", list(range(200))), 200) is not None
    held = plan.pools[0].num_blocks - 1 - manager.block_pools[0].num_free_blocks
    assert held == plan.pools[0].request_blocks == cdiv(200, 16 * context)


def test_context_parallelism_fits_more_tokens_in_the_same_memory() -> None:
    """Eight devices and a latent of one head: with 8 context ranks no token is stored twice."""
    one = plan_kv_cache({"a": LATENT}, num_blocks=1_025, max_model_len=1_024, tensor_parallel=8)
    eight = plan_kv_cache(
        {"a": LATENT}, num_blocks=1_025, max_model_len=1_024, parallel=Parallelism(tensor=8, decode_context=8)
    )
    assert (one.used_bytes, one.concurrency) == (eight.used_bytes, 16)
    assert eight.concurrency == 8 * 16


@pytest.mark.parametrize(
    ("spec", "sizes", "message"),
    [
        (full(8), {"tensor": 3}, "tensor_parallel to divide the 8 KV heads or to be a multiple of them, got 3"),
        (
            full(8),
            {"tensor": 8, "decode_context": 2},
            "to divide the 1 tensor ranks that hold the same KV heads, got 2",
        ),
        (LATENT, {"tensor": 4, "decode_context": 3}, "to divide the 4 tensor ranks that hold the same KV heads, got 3"),
        (full(8), {"prefill_context": 0}, "expected prefill_context_parallel >= 1, got 0"),
        (full(8), {"data": 0}, "expected data_parallel >= 1, got 0"),
    ],
)
def test_ranks_that_cannot_be_are_refused(spec: KVCacheSpec, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_kv_cache(layers((2, spec)), num_blocks=9, max_model_len=64, parallel=Parallelism(**sizes))


@pytest.mark.parametrize(("ranks", "fits"), [(1, True), (4, True), (5, False), (8, False)])
def test_slots_of_all_context_ranks_are_int32(ranks: int, fits: bool) -> None:
    """A slot is `block_id * ranks * block_size + offset`: of 2**25 blocks of 16 tokens, 4 ranks have 2**31."""

    def plan() -> object:
        parallel = Parallelism(prefill_context=ranks)
        return plan_kv_cache({"a": LATENT}, num_blocks=2**25, max_model_len=100, parallel=parallel)

    if fits:
        plan()
    else:
        with pytest.raises(ValueError, match=r"expected at most 2,147,483,648 slots in a pool \(slot ids are int32\)"):
            plan()


def test_parallelism_is_said_once() -> None:
    with pytest.raises(ValueError, match="expected tensor_parallel or parallel, got both: 2 and Parallelism"):
        plan_kv_cache({"a": LATENT}, num_blocks=9, max_model_len=64, tensor_parallel=2, parallel=Parallelism(tensor=4))


class SplitlessSpec(FullAttentionSpec):
    """Full attention that cannot split tokens over ranks."""

    supports_context_parallelism = False


def test_kinds_that_cannot_split_their_tokens_are_refused() -> None:
    spec = SplitlessSpec(block_size=16, num_kv_heads=1, head_size=8, dtype="bfloat16")
    with pytest.raises(NotImplementedError, match="full_attention layers do not work with context parallelism, got 2"):
        plan_kv_cache({"a": spec}, num_blocks=9, max_model_len=64, parallel=Parallelism(prefill_context=2))
