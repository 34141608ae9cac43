"""Without hybrid management: the same tokens are computed and hit, and layers hold more pages."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core import BlockHasher, ChunkedLocalAttentionSpec, KVCacheManager, MLAAttentionSpec, Request
from kvjax.core import SlidingWindowMLASpec as WindowMLA
from kvjax.core.spec import KVCacheSpec
from kvjax.planning import KVCachePlan, plan_kv_cache
from tests.planning.test_plan import full, layers, window

MAX_MODEL_LEN = 512
CHUNKED = ChunkedLocalAttentionSpec(
    block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16", attention_chunk_size=64
)
LATENT = MLAAttentionSpec(block_size=16, head_size=64, dtype="bfloat16")
MODELS = {
    "window": layers((2, full()), (10, window(48))),
    "chunked": layers((2, full()), (6, CHUNKED)),
    "latent": layers((3, LATENT), (3, WindowMLA(block_size=16, head_size=64, dtype="bfloat16", sliding_window=32))),
    "windows_only": layers((4, window(48)), (4, window(96))),
}


def manager_of(specs: dict[str, KVCacheSpec], hybrid: bool) -> tuple[KVCacheManager, KVCachePlan]:
    plan = plan_kv_cache(specs, num_blocks=2_000, max_model_len=MAX_MODEL_LEN, hybrid=hybrid)
    return KVCacheManager(plan.config, MAX_MODEL_LEN, 16), plan


def pages_held(manager: KVCacheManager, request_id: str) -> int:
    """Pages of all layers."""
    groups = manager.kv_cache_config.kv_cache_groups
    tables = manager.get_block_ids(request_id)
    return sum(len(group.layer_names) * sum(map(bool, ids)) for group, ids in zip(groups, tables, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_the_same_tokens_take_more_pages(name: str) -> None:
    """Both managers get the same calls, in pools where nothing is evicted: hits are equal, pages are not."""
    rng = np.random.default_rng(5)
    hasher = BlockHasher(16, "xxhash_cbor", seed="0")
    both = [manager_of(MODELS[name], hybrid)[0] for hybrid in (True, False)]
    assert both[1].num_kv_cache_groups == 1
    trunk = rng.integers(0, 9, MAX_MODEL_LEN).tolist()
    held = np.zeros(2, np.int64)
    for i in range(20):
        prompt = trunk[: rng.integers(1, 400)] + rng.integers(0, 9, rng.integers(1, 60)).tolist()
        outputs = rng.integers(0, 9, 40).tolist()
        results = []
        for which, manager in enumerate(both):
            manager.new_step_starts()
            request = Request(f"r{i}", prompt, block_hasher=hasher)
            blocks, hit = manager.get_computed_blocks(request)
            assert manager.allocate_slots(request, len(prompt) - hit, hit, blocks) is not None
            request.num_computed_tokens = len(prompt)
            for token in outputs:
                request.append_output_token_ids(token)
                assert manager.allocate_slots(request, 1) is not None
                request.num_computed_tokens += 1
            held[which] += pages_held(manager, request.request_id)
            manager.check_invariants()
            manager.free(request)
            results.append((hit, request.num_computed_tokens))
        assert results[0] == results[1]
    assert held[0] < held[1]


@pytest.mark.parametrize("name", MODELS)
def test_promoted_layers_keep_their_masks(name: str) -> None:
    specs = MODELS[name]
    _, plan = manager_of(specs, hybrid=False)
    (group,) = plan.config.kv_cache_groups
    assert sorted(group.layer_names) == sorted(specs)
    for place, layer in enumerate(group.layer_names):
        before, after = specs[layer], group.spec_of(place)
        assert after.kind in ("full_attention", "mla_attention")
        for mask in ("sliding_window", "attention_chunk_size"):
            assert getattr(after, mask, None) == getattr(before, mask, None)


def test_more_requests_fit_with_windows() -> None:
    arguments = {"memory_bytes": 2**30, "max_model_len": 8_192, "max_in_flight_tokens": 512}
    with_windows, without = (plan_kv_cache(MODELS["window"], hybrid=hybrid, **arguments) for hybrid in (True, False))
    assert with_windows.concurrency > 4 * without.concurrency
