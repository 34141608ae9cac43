"""Layers of K and V of every kind, served from pages, equal dense attention with the mask that their options say."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
from flax import nnx

from kvjax.core import KVCacheManager, Request, build_step_plan
from kvjax.core.kinds.chunked_local import ChunkedLocalAttentionSpec
from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.rswa import RSWASpec
from kvjax.core.kinds.sink_full import SinkFullAttentionSpec
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.core.spec import KVCacheConfig, KVCacheGroupSpec, KVCachePoolSpec, cdiv
from kvjax.device import AttentionOptions, Bucket, DeviceBatch, Placement, StepCache, create_pages, write_kv
from tests.device.aliases import assert_in_place
from tests.device.dense_cache import DenseCache
from tests.device.serving import Server
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


LEARNED = tuple(np.random.default_rng(9).standard_normal((2, 8, 4, 8)).astype(np.float32))  # K and V of two blocks


def make_sink_toy(platform: str, *, placement: Placement | None = None) -> Toy:
    """Learned sinks of one layer in blocks that its group reserves, read without a mask and, shared, with a window."""
    specs = {"layers.0": SinkFullAttentionSpec(**HEADS, sink_len=8), "layers.1": FullAttentionSpec(**HEADS)}

    def layers(rngs: nnx.Rngs) -> list[nnx.Module]:
        windowed = AttentionOptions(sm_scale=0.4, sliding_window=WINDOW, num_sink_tokens=2)
        return [
            KVLayer("layers.0", rngs, AttentionOptions(sm_scale=0.4)),
            KVLayer("layers.1", rngs, windowed),
            KVLayer("layers.2", rngs, windowed, shares=True),
        ]

    dense = functools.partial(DenseCache, {"layers.2": "layers.0"}, learned={f"layers.{i}": LEARNED for i in (0, 2)})
    shared = {"layers.2": "layers.0"}
    return Toy.of(specs, layers, dense=dense, shared_layers=shared, platform=platform, placement=placement)


class SinkToy(Toy):
    """Its pages hold the sinks before the first step."""

    def server(self) -> Server:
        server = super().server()
        group_id, column = self.config.layer_index["layers.0"]
        blocks = server.manager.reserved_blocks(group_id)
        slots = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1).astype(np.int32)
        pool_id = self.config.kv_cache_groups[group_id].pool_id
        server.pages = write_kv(server.pages, pool_id, column, *LEARNED, slots)
        return server


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_learned_sinks_stand_before_every_request(platform: str) -> None:
    made = make_sink_toy(platform)
    server = serve_mixed(SinkToy(made.model, made.config, made.step, made.dense), 7)
    compiled = made.step.num_compiled
    made.step.warmup(server.pages)
    assert made.step.num_compiled == compiled, "warm-up has the shapes of a step"


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
        (
            "layers.0",
            AttentionOptions(sm_scale=1.0, sliding_window=WINDOW, sees_prompt=True),
            "expected a cache of R-SWA, which keeps prompts, with sees_prompt=True, got sliding_window",
        ),
    ],
)
def test_refuses_to_look_at_what_is_freed(layer: str, options: AttentionOptions, message: str) -> None:
    config = toy("cpu").config
    batch = DeviceBatch.empty(Bucket(4, 2, 2), len(config.kv_cache_groups))
    cache = StepCache(create_pages(config), batch, config)
    with pytest.raises(ValueError, match=f"layer '{layer}': .*{message}"):
        cache(layer, np.zeros((4, 8, 8), np.float32), *(np.zeros((4, 4, 8), np.float32),) * 2, options)


PROMPT_AND_WINDOW = AttentionOptions(sm_scale=0.4, sliding_window=WINDOW, sees_prompt=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dataclasses.replace(PROMPT_AND_WINDOW, sliding_window=WINDOW + 1), "keeps a window of 6 tokens, asked for 7"),
        (dataclasses.replace(PROMPT_AND_WINDOW, sliding_window=None), "keeps a window of 6 tokens, asked for None"),
        (dataclasses.replace(PROMPT_AND_WINDOW, num_sink_tokens=1), "keeps the first 0 tokens, asked for 1"),
    ],
)
def test_rswa_refuses_to_look_at_what_is_freed(options: AttentionOptions, message: str) -> None:
    spec = RSWASpec(**HEADS, rswa_window=WINDOW)
    pools = (KVCachePoolSpec(8, (spec.page_layout("cpu"),)),)
    config = KVCacheConfig(pools, (KVCacheGroupSpec(("layers.0",), spec),))
    cache = StepCache(create_pages(config), DeviceBatch.empty(Bucket(4, 2, 2), 1, prompts=[0]), config)
    with pytest.raises(ValueError, match=message):
        cache("layers.0", np.zeros((4, 8, 8), np.float32), *(np.zeros((4, 4, 8), np.float32),) * 2, options)


def test_the_prompts_of_a_step_come_padded() -> None:
    """Of groups of R-SWA alone, in the order of the plan: decode first."""
    specs = (RSWASpec(**HEADS, rswa_window=WINDOW), FullAttentionSpec(**HEADS))
    manager = KVCacheManager(KVCacheConfig.single_pool(40, *specs), 64, BLOCK)
    requests = [Request("long", range(9)), Request("short", range(5))]
    for request in requests:
        assert manager.allocate_slots(request, 4) is not None
        request.num_computed_tokens = 4
    for request, new in zip(requests, (5, 1), strict=True):
        assert manager.allocate_slots(request, new) is not None
    plan = build_step_plan(manager, np.array([request.row for request in requests]), np.array([5, 1]))
    assert plan.groups[0].prompt_tokens.tolist() == [5, 9]
    assert plan.groups[1].prompt_tokens is None
    batch = DeviceBatch.from_plan(plan, Bucket(8, 4, 4))
    assert batch.groups[0].prompt_tokens.tolist() == [5, 9, 0, 0]
    assert batch.groups[1].prompt_tokens is None
