"""`kvjax.nnx.PagedKVCache`: pages that jitted functions of NNX update in place."""

from __future__ import annotations

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.core import FullAttentionSpec, KVCacheManager, Request, build_step_plan
from kvjax.device import AttentionOptions, Buckets, DeviceBatch, create_pages
from kvjax.nnx import PagedKVCache
from kvjax.planning import plan_kv_cache

SPEC = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=16, dtype="float32")
CONFIG = plan_kv_cache({"a": SPEC, "b": SPEC}, num_blocks=8, max_model_len=16, max_in_flight_tokens=16).config
BUCKETS = Buckets.default(max_num_batched_tokens=8, max_num_seqs=2, max_model_len=16, block_size=4, max_buckets=1)
OPTIONS = AttentionOptions(sm_scale=0.25)


@partial(nnx.jit, donate_argnums=0, static_argnums=2)
def attend(cache: PagedKVCache, batch: DeviceBatch, layers: tuple[str, ...]) -> list[jax.Array]:
    x = jnp.broadcast_to(jnp.asarray(batch.token_ids, jnp.float32)[:, None, None], (8, 1, 16))
    with cache.step(batch) as attention:
        return [attention(layer, x, x, x, OPTIONS) for layer in layers]


def prefilled() -> tuple[KVCacheManager, Request]:
    manager = KVCacheManager(CONFIG, max_model_len=16, hash_block_size=4)
    request = Request("r", [3, 1, 4, 1, 5])
    assert manager.allocate_slots(request, 5) is not None
    return manager, request


def test_pages_are_written_in_place() -> None:
    manager, request = prefilled()
    cache = PagedKVCache(CONFIG)
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache.pages.get_value())]
    batch = cache.load(build_step_plan(manager, np.array([request.row]), np.array([5])), BUCKETS)
    attend(cache, batch, ("a", "b"))
    pages = cache.pages.get_value()
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pages)] == before
    blocks = manager.get_block_ids(request.request_id)[0]
    keys = np.asarray(pages.column(0, 0)[0])
    np.testing.assert_array_equal(keys[blocks].reshape(-1, 16)[:5, 0], [3, 1, 4, 1, 5])


def test_copies_of_forked_blocks_are_made() -> None:
    """The parent's last block, not full, is copied for the child before it writes."""
    manager, request = prefilled()
    cache = PagedKVCache(CONFIG)
    attend(cache, cache.load(build_step_plan(manager, np.array([request.row]), np.array([5])), BUCKETS), ("a", "b"))
    request.num_computed_tokens = 5
    (child,) = manager.fork(request, 1)
    for token, each in ((7, request), (8, child)):
        each.append_output_token_ids(token)
        assert manager.allocate_slots(each, 1) is not None
    plan = build_step_plan(manager, np.array([request.row, child.row]), np.array([1, 1]))
    assert plan.page_copies[0].sources.size == 1
    attend(cache, cache.load(plan, BUCKETS), ("a", "b"))
    keys = np.asarray(cache.pages.get_value().column(0, 0)[0])
    for each, tokens in ((request, [3, 1, 4, 1, 5, 7]), (child, [3, 1, 4, 1, 5, 8])):
        blocks = manager.get_block_ids(each.request_id)[0]
        np.testing.assert_array_equal(keys[blocks].reshape(-1, 16)[:6, 0], tokens)


def test_a_layer_that_did_not_attend_is_an_error_and_changes_nothing() -> None:
    manager, request = prefilled()
    cache = PagedKVCache(CONFIG)
    batch = cache.load(build_step_plan(manager, np.array([request.row]), np.array([5])), BUCKETS)
    with pytest.raises(ValueError, match="'b'"):
        attend(cache, batch, ("a",))
    chex.assert_trees_all_equal(cache.pages.get_value(), create_pages(CONFIG))


def test_pages_are_a_cache_and_no_parameters() -> None:
    """Optimizers that filter by `nnx.Param` leave them alone."""
    assert not jax.tree.leaves(nnx.state(PagedKVCache(CONFIG), nnx.Param))
    assert jax.tree.leaves(nnx.state(PagedKVCache(CONFIG), nnx.Cache))
