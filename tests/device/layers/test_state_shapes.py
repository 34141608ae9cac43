"""Recurrent states of any number and shape: each array is what its update makes of the state before and the step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core import KVCacheManager, Request
from kvjax.core.kinds.mamba import MambaSpec
from kvjax.core.step.step_builder import build_step_plan
from kvjax.device import Bucket, DeviceBatch, KVPages, Placement, RecurrentStep, StepCache, create_pages
from kvjax.device.pages.kv_pages import Column, page_shapes
from kvjax.planning import plan_kv_cache
from tests.device.aliases import assert_in_place

SHAPES = ((3,), (2, 5), (7, 1, 2), (1, 2, 3, 2))  # no first dimension splits over four devices
DTYPES = ("float32", "int8", "float32", "float32")
BUCKET = Bucket(16, 4, 4)
STEPS = ([5, 3], [1, 6], [1, 1])  # new tokens of both requests


def add_tokens(states: Column, step: RecurrentStep, x: jax.Array) -> tuple[jax.Array, Column]:
    """Every number of a state is the sum of x float32[T] over its request's tokens; the output is x."""
    token, num_seqs = jnp.arange(x.shape[0]), step.state_read.shape[0]
    seq = jnp.searchsorted(step.query_start_loc[1:], token, side="right")
    sums = jax.ops.segment_sum(jnp.where(token < step.query_start_loc[-1], x, 0), seq, num_segments=num_seqs)
    after = []
    for array in states:
        own = (num_seqs, *[1] * (array.ndim - 1))
        before = jnp.where(step.has_initial_state.reshape(own), array[step.state_read], 0)
        pages = jnp.where(step.state_write > 0, step.state_write, array.shape[0])
        after.append(array.at[pages].set((before + sums.reshape(own)).astype(array.dtype), mode="drop"))
    return x[:, None], tuple(after)


def run(placement: Placement) -> None:
    """Three steps of two requests; arrays are updated in two calls, pages start with NaN."""
    spec = MambaSpec(block_size=64, shapes=SHAPES, dtypes=DTYPES)
    config = plan_kv_cache({"a": spec}, num_blocks=3_000, max_model_len=64).config
    manager, rng = KVCacheManager(config, 64, 64), np.random.default_rng(0)
    requests = [Request(name, [0] * 20) for name in "rs"]

    def step(pages: KVPages, batch: DeviceBatch, x: jax.Array) -> tuple[jax.Array, KVPages]:
        cache = StepCache(pages, batch, config, placement)
        out = cache.update_states("a", add_tokens, (x,), (None,), arrays=(2, 0))
        assert cache.unused_layers == ("a",)
        again = cache.update_states("a", add_tokens, (x,), (None,), arrays=(1, 3))
        assert not cache.unused_layers
        return out + again, cache.pages

    compiled = jax.jit(step, donate_argnums=0)
    empty = DeviceBatch.empty(BUCKET, 1, recurrent={0: 0})
    shapes, x = page_shapes(config, placement), np.zeros(BUCKET.num_tokens, np.float32)
    assert_in_place(compiled.lower(shapes, empty, x).compile(), create_pages(config, placement))
    pages = jax.tree.map(
        lambda leaf: jax.device_put(jnp.full(leaf.shape, jnp.nan, leaf.dtype).at[0].set(0), leaf.sharding), shapes
    )
    totals = np.zeros(2)
    for counts in STEPS:
        for request, count in zip(requests, counts, strict=True):
            assert manager.allocate_slots(request, count) is not None
        plan = build_step_plan(manager, np.array([r.row for r in requests]), np.array(counts))
        x = rng.integers(-3, 4, BUCKET.num_tokens).astype(np.float32)
        out, pages = compiled(pages, DeviceBatch.from_plan(plan, BUCKET), x)
        np.testing.assert_array_equal(out[:, 0], 2 * x)
        ends = plan.query_start_loc
        for i, name in enumerate(plan.request_ids):
            totals["rs".index(name)] += x[ends[i] : ends[i + 1]].sum()
            for array, shape in zip(pages.pools[0][0], SHAPES, strict=True):
                page = np.asarray(array[plan.groups[0].state_write[i]], np.float32)
                np.testing.assert_array_equal(page, np.full(shape, totals["rs".index(name)]))
        for request, count in zip(requests, counts, strict=True):
            request.num_computed_tokens += count


def test_states_of_any_shape_follow_their_requests() -> None:
    run(Placement.create())
