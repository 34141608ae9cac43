"""Numpy arrays that callers give to the device are theirs: jax would read them when the device comes to it.

The device is kept busy, so that it has not come to it when the call returns; what the caller writes then is not seen.
"""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.device import (
    Bucket,
    Buckets,
    DeviceBatch,
    EmbedBuffer,
    FunctionModel,
    KVPages,
    Placement,
    copy_pages,
    create_pages,
    make_update_step,
    scatter_pages,
    write_kv,
    zero_pages,
)
from kvjax.device.inputs.packed_inputs import OWN_BYTES
from tests.device.toy import HEAD_DIM, KV_HEADS, ToyHost, ToyModel, toy_config
from tests.spoiled_arrays import aligned, arrays_of, spoil

NUM_PAGES = 600


@jax.jit
def late(pages: KVPages) -> KVPages:
    """The same pages, after some 50 ms of work that nothing can skip."""
    matrix = jnp.ones((600, 600)) * 1e-3
    for _ in range(40):
        matrix = jnp.sin(matrix @ matrix)
    return jax.tree.map(lambda array: array + 0 * matrix[0, 0].astype(array.dtype), pages)


def filled() -> KVPages:
    pages = create_pages(toy_config())
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jax.device_put(jnp.asarray(rng.normal(size=x.shape), x.dtype), x.sharding), pages)


Call = Callable[[KVPages, list[np.ndarray]], KVPages]
CALLS: dict[str, tuple[Call, Callable[[np.random.Generator], list[np.ndarray]]]] = {
    "write": (
        lambda pages, given: write_kv(pages, 0, 1, *given),
        lambda rng: [*rng.normal(size=(2, 9, KV_HEADS, HEAD_DIM)), rng.permutation(np.arange(4, 600))[:9]],
    ),
    "copy": (
        lambda pages, given: copy_pages(pages, 0, *given),
        lambda rng: list(rng.permutation(np.arange(1, NUM_PAGES))[:20].reshape(2, 10)),
    ),
    "zero": (
        lambda pages, given: zero_pages(pages, 0, *given),
        lambda rng: [rng.permutation(np.arange(1, NUM_PAGES))[:10]],
    ),
    "scatter": (
        lambda pages, given: scatter_pages(pages, 0, given[0], columns(pages, given[1:])),
        lambda rng: [rng.permutation(np.arange(1, NUM_PAGES))[:8], *rng.normal(size=(4, 8, 4, KV_HEADS, HEAD_DIM))],
    ),
}


def columns(pages: KVPages, values: list[np.ndarray]) -> tuple[tuple[jax.Array, ...], ...]:
    return jax.tree.unflatten(jax.tree.structure(pages.pools[0]), values)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", CALLS)
def test_work_on_pages_reads_what_was_given(name: str, seed: int) -> None:
    call, make = CALLS[name]
    made = make(np.random.default_rng(seed))
    arrays = [array.astype(np.float32 if array.dtype.kind == "f" else np.int32) for array in made]
    expected = jax.tree.map(np.asarray, call(filled(), arrays))
    given = [aligned(array) for array in arrays]
    pages = call(late(filled()), given)
    spoil(given)
    chex.assert_trees_all_equal(jax.tree.leaves(jax.tree.map(np.asarray, pages)), jax.tree.leaves(expected))


def test_rows_of_vectors_are_those_that_were_given() -> None:
    rng = np.random.default_rng(0)
    buffer = EmbedBuffer(300, 4, "float32", Placement.create())
    for _ in range(20):
        rows, values = aligned(rng.permutation(300)[:270]), aligned(rng.normal(size=(270, 4)), np.float32)
        kept = rows.copy(), values.copy()
        buffer.write(rows, values)
        spoil(rows, values)
        np.testing.assert_array_equal(np.asarray(buffer.array)[kept[0]], kept[1])


def test_a_step_reads_large_arrays_as_they_were_given() -> None:
    """Small ones travel in a buffer of the step's own; block tables of many requests by themselves."""
    bucket = Bucket(64, 64, OWN_BYTES // 4 // 64)
    step = make_update_step(ToyModel(), toy_config(), Buckets((bucket,)), return_logits=True)
    host = ToyHost(toy_config())
    host.add(0, np.arange(20) % 31)
    host.allocate(0, 20)
    plan = host.plan([0], [20])
    batch = DeviceBatch.from_plan(plan, bucket)
    assert max(array.nbytes for array in jax.tree.leaves(batch)) >= OWN_BYTES
    expected = np.asarray(step.run(filled(), batch).logits)
    given = jax.tree.map(aligned, batch)
    output = step.run(late(filled()), given)
    spoil(jax.tree.leaves(given))
    np.testing.assert_array_equal(np.asarray(output.logits), expected)
    features = [array for array in jax.tree.leaves(batch) if array.flags.writeable]
    output = step.run(late(filled()), batch)
    spoil(features)
    np.testing.assert_array_equal(np.asarray(output.logits), expected)


@pytest.mark.parametrize("seed", range(5))
def test_weights_of_functions_and_of_their_updates_are_those_that_were_given(seed: int) -> None:
    """When the step is made and when it takes others, each of the names and shapes that the first had."""
    rng = np.random.default_rng(seed)
    shapes = [(31, 16), (16,), (16, 31)]

    def model() -> FunctionModel:
        return FunctionModel([aligned(rng.normal(size=shape), np.float32) for shape in shapes], forward, head)

    first = model()
    step = make_update_step(first, toy_config(), Buckets((Bucket(8, 2, 8),)))
    for given in (first, model(), model()):
        if given is not first:
            step.set_weights(given)
        kept = [array.copy() for array in arrays_of(given.weights)]
        spoil(given.weights)
        used = step.weights.model(step.weights.arrays).weights
        for own, other in zip(kept, used, strict=True):
            np.testing.assert_array_equal(own, np.asarray(other))
    with pytest.raises(ValueError, match="expected a model whose weights have the names, shapes and dtypes"):
        step.set_weights(FunctionModel({f"w{i}": one for i, one in enumerate(kept)}, forward, head))


def forward(weights: list[jax.Array], token_ids: jax.Array, positions: jax.Array, cache: object) -> jax.Array:
    """A model's function that is never called."""
    raise AssertionError


def head(weights: list[jax.Array], hidden: jax.Array) -> jax.Array:
    """Another."""
    raise AssertionError
