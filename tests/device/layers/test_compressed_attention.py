"""DeepSeek V4's layers served from pages equal the same attention over the whole sequence; what may not be asked."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from kvjax.core.kinds.mla import MLAAttentionSpec, SlidingWindowMLASpec
from kvjax.core.spec import KVCacheSpec
from kvjax.device import AttentionOptions, Bucket, DeviceBatch, Placement, StepCache, create_pages
from pallas_kernels.latent_entries import IndexFp8, LatentFp8
from tests.device.aliases import assert_in_place
from tests.device.dense_cache import DenseCache
from tests.device.toy_kinds import BUCKETS, CompressedLayer, Toy, serve_mixed

WINDOW, TOPK = 6, 3
PAGES = {"float8_e4m3fn": "int8", "bfloat16": "bfloat16"}
OPTIONS = AttentionOptions(sm_scale=0.3, sliding_window=WINDOW)


def compressed_specs(ratios: tuple[int, ...], dims: tuple[int, int], dtype: str) -> dict[str, KVCacheSpec]:
    """Caches as DeepSeek V4's, in small: entries of 4 tokens overlap and have an indexer, those of 8 do not.

    In fp8 an entry takes a byte a number, two for each of 64 rotary ones, and one for the scale of each 64.
    """
    entry, key = {"head_size": dims[0], "dtype": dtype}, {"head_size": dims[1], "dtype": dtype}
    if dtype == "float8_e4m3fn":
        entry = {"head_size": dims[0] + 64 + dims[0] // 64, "dtype": "int8"}
        key = {"head_size": dims[1] + 4, "dtype": "int8"}

    def states(ratio: int, dim: int) -> KVCacheSpec:
        series = 2 if ratio == 4 else 1
        return SlidingWindowMLASpec(
            block_size=4, head_size=2 * series * dim, dtype="float32", sliding_window=series * ratio
        )

    specs: dict[str, KVCacheSpec] = {}
    for i, ratio in enumerate(ratios):
        specs[f"layers.{i}.window"] = SlidingWindowMLASpec(block_size=4, sliding_window=WINDOW, **entry)
        if ratio:
            specs[f"layers.{i}.compressed"] = MLAAttentionSpec(block_size=16, tokens_per_state=ratio, **entry)
            specs[f"layers.{i}.states"] = states(ratio, dims[0])
        if ratio == 4:
            specs[f"layers.{i}.indexer"] = MLAAttentionSpec(block_size=16, tokens_per_state=ratio, **key)
            specs[f"layers.{i}.indexer_states"] = states(ratio, dims[1])
    return specs


def make_toy(
    platform: str,
    *,
    ratios: tuple[int, ...] = (0, 4, 8, 4),
    dims: tuple[int, int] = (8, 6),
    dtype: str = "float32",
    placement: Placement | None = None,
) -> Toy:
    def layers(rngs: nnx.Rngs) -> list[nnx.Module]:
        sizes: dict[int, dict[str, Any]] = {0: {}, 4: {"ratio": 4, "coff": 2, "topk": TOPK}, 8: {"ratio": 8}}
        return [CompressedLayer(i, rngs, OPTIONS, dims=dims, **sizes[ratio]) for i, ratio in enumerate(ratios)]

    def stored(layer_name: str, x: jax.Array) -> jax.Array:
        if dtype == "float32":
            return x
        if dtype == "bfloat16":
            return x.astype(jnp.bfloat16).astype(jnp.float32)
        entries = IndexFp8() if layer_name.endswith(".indexer") else LatentFp8()
        return entries.decode(entries.encode(x), x.shape[-1])

    overlapping = [f"layers.{i}.{role}" for i, r in enumerate(ratios) if r == 4 for role in ("compressed", "indexer")]
    dense = functools.partial(DenseCache, overlapping=tuple(overlapping), stored=stored)
    specs = compressed_specs(ratios, dims, dtype)
    return Toy.of(specs, layers, dense=dense, platform=platform, placement=placement, num_blocks=6000)


toy = functools.cache(make_toy)


@pytest.mark.parametrize(("platform", "budget"), [("cpu", 48), ("cpu", 7), ("cpu", 1), ("tpu", 7)])
def test_served_requests_equal_dense_attention(platform: str, budget: int) -> None:
    """Layers without entries, with picked ones and with all of them; entries complete in the middle of a step."""
    server = serve_mixed(toy(platform), budget)
    assert len({len(group.compressed) for plan in server.plans for group in plan.groups}) == 2


@pytest.mark.parametrize(("dtype", "platform"), [("float8_e4m3fn", "cpu"), ("bfloat16", "tpu")])
def test_entries_are_stored_as_the_spec_says(dtype: str, platform: str) -> None:
    """What is attended to is what the format gives back of the vectors; all layers of one ratio."""
    server = serve_mixed(make_toy(platform, ratios=(4,), dims=(128, 16), dtype=dtype), 9)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(server.pages)} == {PAGES[dtype], "float32"}


def test_all_tables_are_written_in_place() -> None:
    pages = create_pages(toy("cpu").config)
    assert_in_place(toy("cpu").step.compiled(pages, BUCKETS.steps[0]), pages)


def empty_cache() -> StepCache:
    config = toy("cpu").config
    groups = config.kv_cache_groups
    compressed = {i: group.tokens_per_state for i, group in enumerate(groups) if group.tokens_per_state != {1}}
    batch = DeviceBatch.empty(Bucket(4, 2, 2), len(groups), compressed=compressed)
    return StepCache(create_pages(config), batch, config)


def ones(*shape: int) -> jax.Array:
    return jnp.ones(shape, jnp.float32)


def compress(cache: StepCache, kv: int = 16, ratio: int = 4, dim: int = 8, states: str = "layers.1.states") -> None:
    vectors = ones(3, dim)  # of four tokens in two requests
    bias = ones(ratio, kv)
    cache.compress("layers.1.compressed", ones(4, kv), ones(4, kv), bias, lambda *_: vectors, states=states)


def attend(cache: StepCache, options: AttentionOptions = OPTIONS, **arguments: Any) -> jax.Array:
    return cache.attend_compressed("layers.1.window", ones(4, 4, 8), ones(4, 8), options, **arguments)


def test_refuses_states_and_entries_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"layer 'layers.1.compressed': expected a position_bias of 4 > 1 rows, .* 8"):
        compress(empty_cache(), ratio=8)
    with pytest.raises(ValueError, match=r"layer 'layers.1.states': expected KV and scores that make states of .* 8"):
        compress(empty_cache(), kv=8)
    with pytest.raises(ValueError, match=r"layer 'layers.0.window': expected KV and scores that make states"):
        compress(empty_cache(), states="layers.0.window")
    with pytest.raises(ValueError, match=r"layer 'layers.1.compressed': expected vectors that take 8 numbers .* got 7"):
        compress(empty_cache(), dim=7)
    with pytest.raises(
        ValueError, match=r"layer 'layers.1.compressed': expected finish to give 3 vectors, got \(4, 8\)"
    ):
        empty_cache().compress(
            "layers.1.compressed", *(ones(4, 16),) * 3, lambda *_: ones(4, 8), states="layers.1.states"
        )


def test_entries_are_written_once_and_before_they_are_read() -> None:
    def step() -> None:
        cache = empty_cache()
        with pytest.raises(ValueError, match=r"layer 'layers.1.compressed': expected its entries .* compress it first"):
            attend(cache, compressed="layers.1.compressed")
        with pytest.raises(ValueError, match=r"layer 'layers.1.indexer': expected its entries .* compress it first"):
            cache.pick_entries("layers.1.indexer", ones(4, 2, 6), ones(4, 2), TOPK)
        compress(cache)
        assert not {"layers.1.states"} & set(cache.unused_layers)
        assert {"layers.1.compressed", "layers.1.window"} <= set(cache.unused_layers), "written, and not yet read"
        with pytest.raises(ValueError, match=r"layer 'layers.1.compressed' is compressed twice in one step"):
            compress(cache, states="layers.3.states")
        assert attend(cache, compressed="layers.1.compressed").shape == (4, 4, 8)
        assert not {"layers.1.compressed", "layers.1.window"} & set(cache.unused_layers)
        with pytest.raises(ValueError, match=r"layer 'layers.1.window' attends twice in one step"):
            attend(cache)

    jax.eval_shape(step)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": WINDOW + 1}, "layer 'layers.1.window': keeps a window of 6 tokens, asked for 7"),
        ({"soft_cap": 3.0}, r"expected sliding_window and .* got sliding_window=6 and \['soft_cap'\]"),
        ({"num_sink_tokens": 1}, "keeps the first 0 tokens, asked for 1"),
    ],
)
def test_refuses_options_that_it_does_not_take(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(empty_cache(), replace(OPTIONS, **change))


def test_refuses_caches_of_something_else() -> None:
    cache = empty_cache()
    with pytest.raises(
        NotImplementedError, match=r"layer 'layers.1.compressed': expected a cache of a latent for each"
    ):
        cache.attend_latent("layers.1.compressed", ones(4, 4, 4), ones(4, 4, 4), ones(4, 4), ones(4, 4), OPTIONS)
