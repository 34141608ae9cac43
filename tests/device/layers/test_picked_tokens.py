"""Latent layers that see what an indexer picks, served from pages, equal the same over the whole sequence."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.mla import MLAAttentionSpec
from kvjax.device import AttentionOptions, Bucket, DeviceBatch, StepCache, create_pages
from kvjax.planning import plan_kv_cache
from tests.device.aliases import assert_in_place
from tests.device.toy_kinds import BUCKETS, HIDDEN, Toy, linear, scaled, serve_mixed

LATENT, ROPE, HEADS, TOPK = 10, 4, 4, 5
INDEX_HEADS, INDEX_DIM = 3, 6
OPTIONS = AttentionOptions(sm_scale=0.3)


class PickedLayer(nnx.Module):
    """Keys and latents are made of the input number by number, so that they are the same in steps of any size."""

    def __init__(self, name: str, rngs: nnx.Rngs) -> None:
        def scales(size: int) -> nnx.Param:
            return nnx.Param(jax.random.normal(rngs.params(), (size,)))

        self.name = name
        self.q, self.out = linear(HIDDEN, HEADS * (LATENT + ROPE), rngs), linear(HEADS * LATENT, HIDDEN, rngs)
        self.index_q, self.weights = linear(HIDDEN, INDEX_HEADS * INDEX_DIM, rngs), linear(HIDDEN, INDEX_HEADS, rngs)
        self.latent, self.key_pe, self.key = scales(LATENT), scales(ROPE), scales(INDEX_DIM)

    def __call__(self, x: jax.Array, positions: jax.Array, cache: Any) -> jax.Array:
        index_q = self.index_q(x).reshape(-1, INDEX_HEADS, INDEX_DIM)
        picks = cache.pick_tokens(f"{self.name}.indexer", index_q, self.weights(x), scaled(x, self.key), TOPK)
        q_nope, q_pe = jnp.split(self.q(x).reshape(-1, HEADS, LATENT + ROPE), [LATENT], axis=-1)
        new = scaled(x, self.latent), scaled(x, self.key_pe)
        out = cache.attend_latent(self.name, q_nope, q_pe, *new, OPTIONS, picks)
        return self.out(out.reshape(x.shape[0], -1))


def specs(num_layers: int = 2) -> dict[str, Any]:
    latent = MLAAttentionSpec(block_size=4, head_size=LATENT + ROPE, dtype="float32")
    key = MLAAttentionSpec(block_size=4, head_size=INDEX_DIM, dtype="float32")
    names = [f"layers.{i}" for i in range(num_layers)]
    return dict.fromkeys(names, latent) | {f"{name}.indexer": key for name in names}


@functools.cache
def toy(platform: str) -> Toy:
    """Two such layers."""
    return Toy.of(specs(), lambda rngs: [PickedLayer(f"layers.{i}", rngs) for i in range(2)], platform=platform)


def test_latents_and_keys_share_a_block_table() -> None:
    assert len(toy("cpu").config.kv_cache_groups) == 1


@pytest.mark.parametrize(("platform", "budget"), [("cpu", 48), ("cpu", 5), ("tpu", 7)])
def test_served_requests_equal_dense_attention(platform: str, budget: int) -> None:
    """Of more tokens than are picked, and of fewer."""
    serve_mixed(toy(platform), budget)


def test_latents_and_keys_are_written_in_place() -> None:
    pages = create_pages(toy("cpu").config)
    assert_in_place(toy("cpu").step.compiled(pages, BUCKETS.steps[0]), pages)


def empty_cache() -> StepCache:
    others = {
        "layers.2": FullAttentionSpec(block_size=4, num_kv_heads=4, head_size=8, dtype="float32"),
        "layers.3": MLAAttentionSpec(block_size=4, head_size=INDEX_DIM, dtype="float32", tokens_per_state=2),
    }
    config = plan_kv_cache({**specs(1), **others}, num_blocks=4, max_model_len=8).config
    batch = DeviceBatch.empty(Bucket(4, 2, 2), len(config.kv_cache_groups))
    return StepCache(create_pages(config), batch, config)


def latents() -> tuple[jax.Array, ...]:
    return tuple(jnp.ones((4, *shape)) for shape in ((HEADS, LATENT), (HEADS, ROPE), (LATENT,), (ROPE,)))


def pick(layer: str, dim: int = INDEX_DIM) -> jax.Array:
    arrays = (jnp.ones((4, *shape)) for shape in ((INDEX_HEADS, dim), (INDEX_HEADS,), (dim,)))
    return empty_cache().pick_tokens(layer, *arrays, TOPK)


def test_refuses_keys_that_are_not_the_layers() -> None:
    with pytest.raises(
        ValueError, match=r"'layers\.0\.indexer': expected vectors that take 6 numbers of float32, got 7"
    ):
        pick("layers.0.indexer", 7)
    with pytest.raises(NotImplementedError, match=r"'layers\.2': expected a cache of latents, got full_attention"):
        pick("layers.2")
    with pytest.raises(NotImplementedError, match=r"'layers\.3': expected a cache of a key for each token, got"):
        pick("layers.3")


@pytest.mark.parametrize(
    ("picks", "options", "message"),
    [
        (jnp.ones((4, TOPK)), OPTIONS, r"expected picks int32\[4, K\], got float32\[4, 5\]"),
        (jnp.ones((3, TOPK), jnp.int32), OPTIONS, r"expected picks int32\[4, K\], got int32\[3, 5\]"),
        (
            jnp.ones((4, TOPK), jnp.int32),
            AttentionOptions(sm_scale=0.3, sliding_window=3),
            "expected sm_scale alone where tokens are picked, got .*sliding_window=3",
        ),
    ],
)
def test_refuses_picks_and_options_that_do_not_go_together(
    picks: jax.Array, options: AttentionOptions, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        empty_cache().attend_latent("layers.0", *latents(), options, picks)
