"""What prefixes cost, against sets of tokens, and against the sizes of models."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.configs import load_model_config
from kvjax.core.kinds.chunked_local import ChunkedLocalAttentionSpec
from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.core.spec import KVCacheSpec
from kvjax.planning import plan_kv_cache
from kvjax.replay.bounds import CacheCosts, CheckpointBytes, PromptTree
from tests.replay.bounds.naive_bytes import COSTS, checkpoint_bytes
from tests.replay.random_traces import random_trace

HEADS = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16"}
TOKEN_BYTES = 2 * 2 * 64 * 2  # K and V of one token in a layer


def costs_of(specs: dict[str, KVCacheSpec], **options: bool) -> CacheCosts:
    plan = plan_kv_cache(specs, max_model_len=4_096, num_blocks=2_000, platform="cpu", **options)
    return CacheCosts.of(plan, 16)


@pytest.mark.parametrize("name", [name for name, costs in COSTS.items() if costs.forgetful])
@pytest.mark.parametrize("seed", range(4))
def test_checkpoints_cost_what_they_need_together(name: str, seed: int) -> None:
    """Random ones come and go, some of them twice."""
    costs = COSTS[name]
    tree = PromptTree.of(random_trace(seed, 12, hash_block_size=48))
    checkpoints = CheckpointBytes(tree, costs.forgetful)
    rng, kept = np.random.default_rng(seed), list[int]()
    for _ in range(60):
        if kept and rng.random() < 0.4:
            checkpoints.remove(kept.pop(int(rng.integers(len(kept)))))
        else:
            kept.append(int(rng.integers(len(tree.ends))))
            checkpoints.add(kept[-1])
        assert checkpoints.used == checkpoint_bytes(tree, costs, kept)


def test_each_kind_says_what_it_needs() -> None:
    """Of a hit of 1,000 tokens: all before it, the 99 in a window, those in its chunk."""
    full, window = FullAttentionSpec(**HEADS), SlidingWindowSpec(**HEADS, sliding_window=100)
    chunked = ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=768)
    costs = costs_of({"0": full, "1": full, "2": window, "3": chunked, "4": window})
    assert costs.bytes_per_token == 2 * TOKEN_BYTES
    needs = {
        (1_000 - cache.count_skipped(np.array([1_000])).item(), cache.bytes_per_token) for cache in costs.forgetful
    }
    assert needs == {(99, 2 * TOKEN_BYTES), (1_000 - 768, TOKEN_BYTES)}
    assert costs.without_checkpoints() == CacheCosts(2 * TOKEN_BYTES)


def test_windows_that_keep_every_token_cost_as_all_others() -> None:
    specs: dict[str, KVCacheSpec] = {
        "0": FullAttentionSpec(**HEADS),
        "1": SlidingWindowSpec(**HEADS, sliding_window=100),
    }
    assert costs_of(specs, hybrid=False) == CacheCosts(2 * TOKEN_BYTES)


@pytest.mark.parametrize(
    ("model", "token_bytes", "checkpoint_megabytes"),
    [
        ("qwen3-next-80b-a3b", 12 * 2 * 2 * 256 * 2, 36 * (32 * 128 * 128 * 2 + 3 * 8_192 * 2) / 1e6),
        ("gemma-3-27b", 10 * 2 * 16 * 128 * 2, 52 * 1_023 * 2 * 16 * 128 * 2 / 1e6),
        ("llama-3-8b", 32 * 2 * 8 * 128 * 2, 0.0),
    ],
)
def test_models_cost_what_their_layers_say(model: str, token_bytes: int, checkpoint_megabytes: float) -> None:
    """Layers, heads, dims and bytes of full attention; the states (and three columns of convolution) or windows."""
    specs = load_model_config(model).kv_cache_specs()
    plan = plan_kv_cache(specs, max_model_len=8_192, memory_bytes=10**11, platform="gpu")
    costs = CacheCosts.of(plan, 16)
    assert costs.bytes_per_token == token_bytes
    length = np.array([5_000])
    per_checkpoint = sum(
        (5_000 - cache.count_skipped(length).item()) * cache.bytes_per_token for cache in costs.forgetful
    )
    assert per_checkpoint / 1e6 == pytest.approx(checkpoint_megabytes, rel=1e-3)
