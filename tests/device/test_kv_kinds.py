"""Layers of K and V of every kind, served from pages, equal dense attention with the mask that their options say."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from flax import nnx

from kvjax.core.kinds.chunked_local import ChunkedLocalAttentionSpec
from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.core.spec import cdiv
from kvjax.device import AttentionOptions, Bucket, DeviceBatch, PagedKVCache, Placement, create_pages
from tests.device.aliases import assert_in_place
from tests.device.toy_kinds import BUCKETS, MAX_MODEL_LEN, KVLayer, Toy, serve_mixed

BLOCK, WINDOW, CHUNK, FIRST = 4, 6, 6, 5
HEADS: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 4, "head_size": 8, "dtype": "float32"}
FIRST_AND_WINDOW = SlidingWindowSpec(**HEADS, sliding_window=WINDOW, num_sink_tokens=FIRST)
STREAMING = AttentionOptions(sm_scale=0.4, sliding_window=WINDOW, num_sink_tokens=FIRST)
CHUNKED = AttentionOptions(sm_scale=0.4, attention_chunk_size=CHUNK)


def make_toy(platform: str, *, placement: Placement | None = None) -> Toy:
    """First tokens and a window; chunks that straddle blocks; V shorter than K; a layer that shares pages."""
    dims = (8, 8 if platform == "tpu" else 6)  # pages of a TPU hold K and V of one length
    specs = {
        "layers.0": FIRST_AND_WINDOW,
        "layers.1": ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=CHUNK),
        "layers.2": FullAttentionSpec(**HEADS, head_size_v=dims[1]),
        "layers.3": SlidingWindowSpec(**HEADS, head_size_v=dims[1], sliding_window=WINDOW),
    }

    def layers(rngs: nnx.Rngs) -> list[nnx.Module]:
        return [
            KVLayer("layers.0", rngs, STREAMING),
            KVLayer("layers.1", rngs, CHUNKED, has_sinks=True),
            KVLayer("layers.2", rngs, AttentionOptions(sm_scale=0.4, soft_cap=3.0), dims=dims, has_sinks=True),
            KVLayer("layers.3", rngs, AttentionOptions(sm_scale=0.4, sliding_window=WINDOW), dims=dims),
            KVLayer("layers.4", rngs, STREAMING, dims=dims, shares=True),
        ]

    return Toy.of(specs, layers, shared_layers={"layers.4": "layers.2"}, platform=platform, placement=placement)


toy = functools.cache(make_toy)


@pytest.mark.parametrize(("platform", "budget"), [("cpu", 48), ("cpu", 7), ("cpu", 1), ("tpu", 7)])
def test_served_requests_equal_dense_attention(platform: str, budget: int) -> None:
    """Chunks of a prompt end inside blocks, windows and attention chunks; hits begin inside windows."""
    serve_mixed(toy(platform), budget)


def test_first_tokens_and_a_window_hold_no_more_than_their_formula() -> None:
    """In every step of a generation, and the first blocks are always those that the prompt began with."""
    server = toy("cpu").server()
    server.run({"a": list(range(20))}, MAX_MODEL_LEN - 24, budget=5)
    group = next(g for g, spec in enumerate(toy("cpu").config.kv_cache_groups) if "layers.0" in spec.layer_names)
    first, starts = cdiv(FIRST, BLOCK), set()
    for plan in server.plans:
        (ids,), (new,) = plan.groups[group].block_tables, plan.num_new_tokens.tolist()
        assert np.count_nonzero(ids) <= first + cdiv(WINDOW - 1 + new, BLOCK) + 1
        starts.add(tuple(ids[:first]))
    assert len(starts) == 1
    assert len(server.plans) > 30


def test_pages_are_updated_in_place() -> None:
    pages = create_pages(toy("cpu").config)
    assert_in_place(toy("cpu").step.compiled(pages, BUCKETS.steps[0]), pages)


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (
            "layers.0",
            AttentionOptions(sm_scale=1.0, sliding_window=WINDOW, num_sink_tokens=FIRST + 1),
            "the first 5 .* 6",
        ),
        ("layers.0", AttentionOptions(sm_scale=1.0), "keeps a window of 6 tokens, asked for None"),
        ("layers.1", AttentionOptions(sm_scale=1.0), "keeps chunks of 6 tokens, asked for None"),
        ("layers.1", AttentionOptions(sm_scale=1.0, attention_chunk_size=4), "keeps chunks of 6 tokens, asked for 4"),
        ("layers.1", AttentionOptions(sm_scale=1.0, attention_chunk_size=3, num_sink_tokens=1), "the first 0 .* 1"),
    ],
)
def test_refuses_to_look_at_what_is_freed(layer: str, options: AttentionOptions, message: str) -> None:
    config = toy("cpu").config
    batch = DeviceBatch.empty(Bucket(4, 2, 2), len(config.kv_cache_groups))
    cache = PagedKVCache(create_pages(config), batch, config)
    with pytest.raises(ValueError, match=f"layer '{layer}': .*{message}"):
        cache(layer, np.zeros((4, 8, 8), np.float32), *(np.zeros((4, 4, 8), np.float32),) * 2, options)
