"""Asking for the tokens whose logits are wanted gives what asking for all gives at their places, and the same pages.

The oracle is the cache itself, asked for all tokens: what that gives is held to dense attention elsewhere.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.core import KVCacheManager, Request
from kvjax.core.step.step_builder import build_step_plan
from kvjax.core.step.step_drafts import StepDrafts
from kvjax.core.step.step_plan import StepPlan
from kvjax.device import AttentionOptions, Bucket, Buckets, DeviceBatch, StepCache, make_update_step
from kvjax.device.layers.wanted_rows import MOST_TABLE_ENTRIES
from kvjax.device.mesh.placement import Placement
from kvjax.device.pages.kv_pages import KVPages, page_shapes
from kvjax.models.config import ModelConfig
from kvjax.models.registry import build_model
from kvjax.planning import plan_kv_cache
from tests.device.toy import HEAD_DIM, KV_HEADS, Q_HEADS, WINDOW, toy_config
from tests.models.configs import gemma3_dict, llama_dict

CONFIG = toy_config(num_blocks=64)
OPTIONS = {
    "layers.0": AttentionOptions(sm_scale=HEAD_DIM**-0.5, sliding_window=WINDOW),
    "layers.1": AttentionOptions(sm_scale=HEAD_DIM**-0.5, soft_cap=5.0, sinks=jnp.linspace(-1.0, 1.0, Q_HEADS)),
}


def ragged_plan(config=CONFIG, num_drafts: int = 0) -> StepPlan:
    """A request that decodes, chunks that end prompts of 1 and 13 tokens, and one whose prompt goes on."""
    block_size = config.kv_cache_groups[0].kv_cache_spec.block_size
    manager = KVCacheManager(config, 64, block_size)
    rng, rows = np.random.default_rng(0), []
    for name, (num_tokens, computed, new) in enumerate([(9, 8, 1), (1, 0, 1), (20, 7, 13), (30, 5, 6)]):
        request = Request(str(name), rng.integers(1, 30, num_tokens).tolist())
        if computed:
            manager.allocate_slots(request, computed)
            request.num_computed_tokens = computed
        manager.allocate_slots(request, new + (num_drafts if name == 0 else 0))
        rows.append(request.row)
    counts = np.array([num_drafts, 0, 0, 0])
    drafts = StepDrafts(counts, np.full((4, num_drafts), 7)) if num_drafts else None
    return build_step_plan(manager, np.array(rows), np.array([1, 1, 13, 6]) + counts, drafts=drafts)


def pages_of(config=CONFIG) -> KVPages:
    """Random pages, as if all tokens before were computed; the null page is 0."""

    def page_array(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        seed = sum(map(ord, str(path)))
        return jax.random.normal(jax.random.key(seed), leaf.shape, leaf.dtype).at[0].set(0)

    return jax.tree_util.tree_map_with_path(page_array, page_shapes(config, Placement.create()))


def attended(batch: DeviceBatch, layer: str, *, narrows: bool) -> tuple[jax.Array, KVPages]:
    num_tokens = batch.token_ids.shape[0]
    shapes = ((Q_HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM))
    q, k, v = (jax.random.normal(jax.random.key(i), (num_tokens, *shape)) for i, shape in enumerate(shapes))

    def step(pages: KVPages) -> tuple[jax.Array, KVPages]:
        cache = StepCache(pages, batch, CONFIG, narrows=narrows)
        if narrows:
            assert cache.wanted is not None
            return cache(layer, q[cache.wanted], k, v, OPTIONS[layer]), cache.pages
        return cache(layer, q, k, v, OPTIONS[layer])[batch.logits_indices], cache.pages

    return jax.jit(step)(pages_of())


@pytest.mark.parametrize("layer", OPTIONS)
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_wanted_tokens_attend_as_among_all(layer: str, num_drafts: int) -> None:
    plan = ragged_plan(num_drafts=num_drafts)
    batch = DeviceBatch.from_plan(plan, Bucket(40, 6, 8, num_drafts))
    given, pages = attended(batch, layer, narrows=True)
    wanted, same_pages = attended(batch, layer, narrows=False)
    real = plan.logits_indices.size
    assert real == 3 + num_drafts
    np.testing.assert_allclose(given[:real], wanted[:real], atol=2e-6, rtol=0)
    assert not given[real:].any(), "padding attends to nothing"
    chex.assert_trees_all_equal(pages, same_pages, strict=True)


def test_a_step_without_requests_attends_to_nothing() -> None:
    batch = DeviceBatch.empty(Bucket(16, 4, 4), 2)
    given, pages = attended(batch, "layers.1", narrows=True)
    assert not given.any()
    chex.assert_trees_all_equal(pages, pages_of(), strict=True)


@pytest.mark.parametrize(
    "bucket",
    [
        pytest.param(Bucket(4, 4, 4), id="as many rows as tokens"),
        pytest.param(Bucket(4, 4, 4, is_mixed=False), id="decode"),
        pytest.param(Bucket(4096, 64, MOST_TABLE_ENTRIES // 64, 4), id="large tables of drafts"),
    ],
)
def test_all_tokens_are_wanted(bucket: Bucket) -> None:
    batch = DeviceBatch.empty(bucket, 2)
    cache = jax.eval_shape(lambda pages: StepCache(pages, batch, CONFIG, narrows=True).wanted, pages_of())
    assert cache is None


class AsksForAll(nnx.Module):
    """A model whose last layer cannot tell what is wanted."""

    def __init__(self, model: nnx.Module) -> None:
        self.model = model

    def __call__(self, token_ids: jax.Array, positions: jax.Array, cache: StepCache) -> jax.Array:
        cache.wanted = None
        return self.model(token_ids, positions, cache)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return self.model.logits(hidden)


@pytest.mark.parametrize(
    "config",
    [pytest.param(llama_dict(), id="llama"), pytest.param(gemma3_dict(), id="gemma3", marks=pytest.mark.sweep)],
)
def test_logits_and_pages_of_a_model_are_those_of_one_that_asks_for_all(config: dict) -> None:
    parsed = ModelConfig.from_dict(config)
    model = build_model(parsed, dtype="float32", rngs=nnx.Rngs(0))
    caches = plan_kv_cache(parsed.kv_cache_specs(4, "float32"), num_blocks=128, max_model_len=64).config
    plan, buckets = ragged_plan(caches), Buckets((Bucket(40, 6, 16),))
    results = []
    for one in (model, AsksForAll(model)):
        step = make_update_step(one, caches, buckets, return_logits=True)
        output = step(pages_of(caches), plan)
        results.append((output.logits[: plan.logits_indices.size], output.pages))
    np.testing.assert_allclose(results[0][0], results[1][0], atol=2e-5, rtol=0)
    chex.assert_trees_all_close(results[0][1], results[1][1], atol=1e-5)
