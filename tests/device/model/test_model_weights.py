"""Weights as a call takes them: the model that a program sees has each of its weights, whatever array it lies in."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.device.mesh.placement import Placement
from kvjax.device.model.model_weights import SMALL_BYTES, ModelWeights


class Weights(NamedTuple):
    """A model of weights alone."""

    norm: jax.Array
    table: jax.Array
    bias: jax.Array
    half: jax.Array
    long: jax.Array
    other_half: jax.Array

    def __call__(self) -> None:
        """What a model must have."""

    def logits(self) -> None:
        """What a model must have."""


def model(seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)

    def weight(dtype: jnp.dtype, *shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    return Weights(
        norm=weight(jnp.float32, 24),
        table=weight(jnp.float32, 3, 8),
        bias=weight(jnp.float32, 7),
        half=weight(jnp.bfloat16, 16),
        long=weight(jnp.float32, SMALL_BYTES // 4),
        other_half=weight(jnp.bfloat16, 1),
    )


@pytest.mark.parametrize("packs_small", [False, True])
def test_a_program_sees_the_weights_of_the_model(packs_small: bool) -> None:
    """The same numbers, shapes and dtypes, in the same places."""
    given = model()
    weights = ModelWeights(given, Placement.create(), packs_small=packs_small)
    seen = jax.jit(lambda arrays: tuple(weights.model(arrays)))(weights.arrays)
    for name, own, other in zip(given._fields, given, seen, strict=True):
        assert (own.shape, own.dtype) == (other.shape, other.dtype), name
        np.testing.assert_array_equal(np.asarray(own, np.float32), np.asarray(other, np.float32), err_msg=name)


def test_short_vectors_of_a_dtype_are_one_argument_and_other_weights_are_not_copied() -> None:
    given = model()
    weights = ModelWeights(given, Placement.create(), packs_small=True)
    assert weights.arrays[0] is given.table
    assert weights.arrays[1] is given.long
    assert len(weights.arrays) == 4  # and the short vectors of two dtypes
    assert len(ModelWeights(given, Placement.create()).arrays) == len(given)


def test_shapes_in_place_of_weights_stay_as_they_are() -> None:
    """A step can be compiled for weights that are nowhere: there is nothing to copy."""
    placement = Placement.create()
    shapes = Weights(*(jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=placement.replicated) for w in model()))
    assert ModelWeights(shapes, placement, packs_small=True).arrays == tuple(shapes)
