"""What a model may ask of the paged cache, and how it is told that it may not."""

from __future__ import annotations

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core import KVCacheManager, Request
from kvjax.core.spec import KVCacheConfig, KVCacheGroupSpec, KVCachePoolSpec, KVCacheSpec
from kvjax.core.step.step_builder import build_step_plan
from kvjax.device import AttentionOptions, Bucket, DeviceBatch, KVPages, StepCache, create_pages
from kvjax.planning import plan_kv_cache
from tests.device.toy import HEAD_DIM, KV_HEADS, Q_HEADS, WINDOW, toy_config

TOKENS = 4
OPTIONS = AttentionOptions(sm_scale=1.0, sliding_window=WINDOW)


def empty_cache() -> StepCache:
    config = toy_config(num_blocks=4)
    return StepCache(create_pages(config), DeviceBatch.empty(Bucket(TOKENS, 2, 2), 2), config)


def states(q_heads: int = Q_HEADS, kv_heads: int = KV_HEADS, dim: int = HEAD_DIM, dim_v: int = HEAD_DIM) -> tuple:
    shapes = ((q_heads, dim), (kv_heads, dim), (kv_heads, dim_v))
    return tuple(jnp.ones((TOKENS, *shape), jnp.float32) for shape in shapes)


def test_knows_which_layers_have_attended() -> None:
    def step() -> jax.Array:
        cache = empty_cache()
        assert cache.unused_layers == ("layers.0", "layers.2", "layers.1")
        out = cache("layers.2", *states(), OPTIONS)
        assert cache.unused_layers == ("layers.0", "layers.1")
        return out

    out = jax.jit(step)()
    assert out.shape == (TOKENS, Q_HEADS, HEAD_DIM)
    assert not out.any(), "padding attends to nothing"


def test_refuses_unknown_layers_and_a_layer_twice() -> None:
    cache = empty_cache()
    with pytest.raises(ValueError, match=r"expected a layer out of \('layers.0', .*\), got 'layers.9'"):
        cache("layers.9", *states(), OPTIONS)

    def step() -> None:
        cache("layers.0", *states(), OPTIONS)
        cache("layers.0", *states(), OPTIONS)

    with pytest.raises(ValueError, match=r"layer 'layers.0' attends twice in one step"):
        jax.eval_shape(step)


@pytest.mark.parametrize("window", [None, WINDOW + 1])
def test_refuses_to_look_further_back_than_the_group_keeps(window: int | None) -> None:
    options = AttentionOptions(sm_scale=1.0, sliding_window=window)
    with pytest.raises(ValueError, match=f"layer 'layers.0': keeps a window of {WINDOW} tokens, asked for {window}"):
        empty_cache()("layers.0", *states(), options)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"kv_heads": 2}, r"expected K and V of \(\(4, 8\), \(4, 8\)\) a token, got \(2, 8\) and \(2, 8\)"),
        ({"dim_v": 4}, r"expected K and V of \(\(4, 8\), \(4, 8\)\) a token, got \(4, 8\) and \(4, 4\)"),
        ({"q_heads": 6}, r"expected queries of 4 \* n heads of 8, got \(6, 8\)"),
    ],
)
def test_refuses_shapes_that_are_not_the_layers(sizes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        empty_cache()("layers.1", *states(**sizes), OPTIONS)


class StateSpec(KVCacheSpec):
    """A cache that is not made of K and V."""

    kind = "state"
    page_size_bytes = 4
    num_reserved_blocks = 0
    state_pages = None
    tokens_per_state = 1
    entry_shapes = ()

    def page_layout(self, platform: str, num_shards: int = 1):
        raise AssertionError

    def skipped_tokens(self, num_computed_tokens):
        return num_computed_tokens * 0

    def tokens_until_skipped(self, num_tokens):
        raise AssertionError

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return 1


def test_refuses_a_cache_without_k_and_v() -> None:
    config = toy_config(num_blocks=4)
    groups = (KVCacheGroupSpec(("state",), StateSpec(block_size=4)),)
    batch = DeviceBatch.empty(Bucket(TOKENS, 2, 2), 1)
    cache = StepCache(create_pages(config), batch, KVCacheConfig(config.pools, groups))
    with pytest.raises(NotImplementedError, match="layer 'state': expected a cache of K and V, got state"):
        cache("state", *states(), OPTIONS)


def attend_twice(shares: bool) -> tuple[jax.Array, jax.Array]:
    """Two layers over the same K and V of six tokens; the second keeps pages of its own, or reads the first's."""
    spec = toy_config().kv_cache_groups[1].kv_cache_spec
    names = ("a",) if shares else ("a", "b")
    columns = (spec.page_layout("cpu"),) * len(names)
    groups = (KVCacheGroupSpec(names, spec),)
    config = KVCacheConfig((KVCachePoolSpec(8, columns),), groups, (("b", "a"),) if shares else ())
    manager = KVCacheManager(config, 16, spec.block_size)
    request = Request("r", range(6))
    manager.allocate_slots(request, 6)
    plan = build_step_plan(manager, np.array([request.row]), np.array([6]))
    batch = DeviceBatch.from_plan(plan, Bucket(8, 2, 4))
    draws = (jax.random.normal(jax.random.key(i), (8, heads, HEAD_DIM)) for i, heads in enumerate((8, 8, 4, 4)))
    q_a, q_b, k, v = draws

    def step(pages: KVPages) -> tuple[jax.Array, jax.Array]:
        cache = StepCache(pages, batch, config)
        options = AttentionOptions(sm_scale=1.0)
        return cache("a", q_a, k, v, options), cache("b", q_b, *((None, None) if shares else (k, v)), options)

    return jax.jit(step)(create_pages(config))


def test_a_layer_that_shares_reads_what_the_other_wrote() -> None:
    own = attend_twice(shares=False)
    assert all(out[:6].any() for out in own)
    chex.assert_trees_all_equal(attend_twice(shares=True), own, strict=True)


def attend_with_heads(heads: dict[str, int]) -> dict[str, jax.Array]:
    """Layers over six tokens, each with KV heads of its own, planned together."""
    spec = toy_config().kv_cache_groups[1].kv_cache_spec
    specs = {name: replace(spec, num_kv_heads=kv_heads) for name, kv_heads in heads.items()}
    config = plan_kv_cache(specs, num_blocks=8, max_model_len=16).config
    assert len(config.kv_cache_groups) == 1
    manager = KVCacheManager(config, 16, spec.block_size)
    request = Request("r", range(6))
    manager.allocate_slots(request, 6)
    batch = DeviceBatch.from_plan(build_step_plan(manager, np.array([request.row]), np.array([6])), Bucket(8, 2, 4))

    def draw(seed: int, num_heads: int) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), (8, num_heads, HEAD_DIM))

    def step(pages: KVPages) -> dict[str, jax.Array]:
        cache = StepCache(pages, batch, config)
        options = AttentionOptions(sm_scale=1.0)
        return {
            name: cache(name, draw(0, Q_HEADS), draw(1, kv_heads), draw(2, kv_heads), options)
            for name, kv_heads in heads.items()
        }

    return jax.jit(step)(create_pages(config))


def test_layers_of_one_table_may_differ_in_heads() -> None:
    together = attend_with_heads({"a": 4, "b": 2, "c": 4})
    alone = attend_with_heads({"a": 4}) | attend_with_heads({"b": 2})
    assert all(out[:6].any() for out in alone.values())
    chex.assert_trees_all_equal(together, {**alone, "c": alone["a"]}, strict=True)


def test_refuses_kv_where_none_is_kept_and_none_where_it_is() -> None:
    config = toy_config(num_blocks=4)
    config = KVCacheConfig(config.pools, config.kv_cache_groups, (("layers.3", "layers.1"),))
    q, k, v = states()

    def cache() -> StepCache:
        return StepCache(create_pages(config), DeviceBatch.empty(Bucket(TOKENS, 2, 2), 2), config)

    with pytest.raises(ValueError, match=r"layer 'layers.1': expected K and V, got none; only shared_layers have none"):
        cache()("layers.1", q, None, None, OPTIONS)
    with pytest.raises(ValueError, match=r"layer 'layers.3' reads what 'layers.1' writes"):
        cache()("layers.3", q, None, None, OPTIONS)

    def step() -> None:
        after = cache()
        after("layers.1", q, k, v, OPTIONS)
        after("layers.3", q, k, v, OPTIONS)

    with pytest.raises(ValueError, match=r"layer 'layers.3' reads the pages of 'layers.1'; expected no K and V"):
        jax.eval_shape(step)
