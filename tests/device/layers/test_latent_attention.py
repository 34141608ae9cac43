"""Latent layers served from pages equal dense attention over the whole sequence, and what a model may not ask."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.mla import MLAAttentionSpec, SlidingWindowMLASpec
from kvjax.device import AttentionOptions, Bucket, DeviceBatch, Placement, StepCache, create_pages
from kvjax.planning import plan_kv_cache
from tests.device.aliases import assert_in_place
from tests.device.toy_kinds import BUCKETS, KVLayer, LatentLayer, Toy, serve_mixed

LATENT, ROPE, WINDOW = 10, 4, 6
PLAIN = AttentionOptions(sm_scale=0.3)
WINDOWED = AttentionOptions(sm_scale=0.3, sliding_window=WINDOW)
SIZES: dict[str, Any] = {"block_size": 4, "head_size": LATENT + ROPE, "dtype": "float32"}


def specs() -> dict[str, Any]:
    return {
        "layers.0": MLAAttentionSpec(**SIZES),
        "layers.1": SlidingWindowMLASpec(**SIZES, sliding_window=WINDOW),
        "layers.2": FullAttentionSpec(block_size=4, num_kv_heads=4, head_size=8, dtype="float32"),
    }


def make_toy(platform: str, *, heads: int = 4, placement: Placement | None = None) -> Toy:
    """Every token's latent, a window's with sinks, K and V, and one that reads the first's latents."""

    def layers(rngs: nnx.Rngs) -> list[nnx.Module]:
        return [
            LatentLayer("layers.0", rngs, AttentionOptions(sm_scale=0.3, soft_cap=4.0), heads=heads),
            LatentLayer("layers.1", rngs, WINDOWED, has_sinks=True),
            KVLayer("layers.2", rngs, PLAIN),
            LatentLayer("layers.3", rngs, WINDOWED, shares=True),
        ]

    return Toy.of(specs(), layers, shared_layers={"layers.3": "layers.0"}, platform=platform, placement=placement)


toy = functools.cache(make_toy)


@pytest.mark.parametrize(("platform", "budget"), [("cpu", 48), ("cpu", 7), ("cpu", 1), ("tpu", 7)])
def test_served_requests_equal_dense_attention(platform: str, budget: int) -> None:
    serve_mixed(toy(platform), budget)


def test_latents_are_written_in_place() -> None:
    pages = create_pages(toy("cpu").config)
    assert_in_place(toy("cpu").step.compiled(pages, BUCKETS.steps[0]), pages)


def empty_cache() -> StepCache:
    compressed = MLAAttentionSpec(**SIZES, tokens_per_state=2)
    config = plan_kv_cache({**specs(), "layers.4": compressed}, num_blocks=4, max_model_len=8).config
    batch = DeviceBatch.empty(Bucket(4, 2, 2), len(config.kv_cache_groups))
    return StepCache(create_pages(config), batch, config)


def states(latent: int = LATENT, rope: int = ROPE, key_pe: int = ROPE) -> tuple[jax.Array, ...]:
    return tuple(jnp.ones((4, *shape)) for shape in ((4, latent), (4, rope), (latent,), (key_pe,)))


@pytest.mark.parametrize(
    ("layer", "arguments", "options", "message"),
    [
        ("layers.0", states(latent=9), PLAIN, r"expected queries of 14 numbers in two parts, got \(9, 4\)"),
        ("layers.0", states(key_pe=3), PLAIN, r"expected a latent and a rotated key of \(10, 4\) .* got 10 and 3"),
        ("layers.0", (*states()[:3], None), PLAIN, "expected latents, got none; only shared_layers have none"),
        ("layers.1", states(), PLAIN, "layer 'layers.1': keeps a window of 6 tokens, asked for None"),
        (
            "layers.0",
            states(),
            AttentionOptions(sm_scale=0.3, v_scale=jnp.float32(2)),
            "a latent is key and value; expected k_scale alone, got v_scale",
        ),
    ],
)
def test_refuses_what_is_not_the_layers(layer: str, arguments: Any, options: AttentionOptions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        empty_cache().attend_latent(layer, *arguments, options)


@pytest.mark.parametrize(("layer", "got"), [("layers.2", "full_attention with"), ("layers.4", "mla_attention with")])
def test_refuses_a_cache_of_something_else(layer: str, got: str) -> None:
    message = f"layer '{layer}': expected a cache of a latent for each token, got {got}"
    with pytest.raises(NotImplementedError, match=message):
        empty_cache().attend_latent(layer, *states(), PLAIN)
    with pytest.raises(NotImplementedError, match=r"layer 'layers.0': expected a cache of K and V, got mla_attention"):
        empty_cache()("layers.0", *(jnp.ones((4, 4, 8)),) * 3, PLAIN)
