"""A step's inputs in one buffer: what comes out in the program is what went in on the host."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from kvjax.device.inputs.packed_inputs import OWN_BYTES, PackedInputs, shapes_of


class Inputs(NamedTuple):
    ids: np.ndarray
    table: np.ndarray
    flags: np.ndarray
    weights: np.ndarray
    seeds: np.ndarray
    nothing: np.ndarray
    missing: None
    scalar: np.ndarray
    by_ratio: dict[int, np.ndarray]


def random_inputs(seed: int) -> Inputs:
    rng = np.random.default_rng(seed)
    return Inputs(
        ids=rng.integers(-(2**31), 2**31, 7).astype(np.int32),
        table=rng.integers(0, 99, (4, 3)).astype(np.int32).T,
        flags=rng.random(5) < 0.5,
        weights=np.array([0.5, -0.0, np.inf, 1e-40, 3.0], np.float32),
        seeds=rng.integers(0, 2**32, 3).astype(np.uint32),
        nothing=np.zeros((0, 4), np.int32),
        missing=None,
        scalar=np.array(7, np.int32),
        by_ratio={4: np.arange(2, dtype=np.int32), 128: np.arange(3, dtype=np.int32)},
    )


def through_a_program(tree: Any) -> tuple[Any, Any]:
    """What a jitted function has of `tree`, and what it is given."""
    leaves, shapes = shapes_of(tree)
    inputs = PackedInputs(shapes)
    packed = inputs.pack(leaves)
    return jax.jit(inputs.unpack)(*packed), packed


def assert_same(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert np.asarray(ours).tobytes() == np.ascontiguousarray(theirs).tobytes()  # bits, signs of zeros too


@pytest.mark.parametrize("seed", range(3))
def test_the_program_has_the_same_bits_under_the_same_names(seed: int) -> None:
    inputs = random_inputs(seed)
    got, packed = through_a_program(inputs)
    assert_same(got, inputs)
    assert packed.buffer.dtype == np.int32
    assert packed.own == ()


def test_large_arrays_and_those_of_other_sizes_go_by_themselves() -> None:
    large = np.arange(OWN_BYTES // 4, dtype=np.int32)
    short = np.arange(3, dtype=np.float16)
    tree = {"large": large, "nearly": large[1:], "short": short}
    got, packed = through_a_program(tree)
    assert_same(got, tree)
    assert_same(packed.own, (large, short))
    assert not any(np.shares_memory(array, leaf) for array, leaf in zip(packed.own, (large, short), strict=True))
    assert packed.buffer.size == large.size


def test_each_array_begins_at_256_bytes() -> None:
    """As XLA wants it that gives a kernel a slice of the buffer as it lies."""
    tree = {
        name: np.full(size, value, np.int32) for value, (name, size) in enumerate({"a": 3, "b": 64, "c": 65}.items())
    }
    _, packed = through_a_program(tree)
    assert np.flatnonzero(np.diff(packed.buffer)).tolist() == [63, 127, 192]
    assert packed.buffer.size % 64 == 0


def test_a_packed_buffer_is_a_copy_of_every_small_array() -> None:
    """The plan's arrays may change while the step is on its way."""
    inputs = random_inputs(0)
    leaves, shapes = shapes_of(inputs)
    packed = PackedInputs(shapes).pack(leaves)
    assert not any(np.shares_memory(packed.buffer, leaf) for leaf in leaves)


def test_layouts_are_told_apart_by_structure_shape_and_dtype() -> None:
    one = {"a": np.zeros(4, np.int32)}
    others = [{"b": one["a"]}, {"a": np.zeros(5, np.int32)}, {"a": np.zeros(4, np.float32)}, {"a": one["a"], "c": None}]
    keys = [shapes_of(tree)[1] for tree in (one, {"a": np.ones(4, np.int32)}, *others)]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 1 + len(others)


def test_a_step_without_inputs_has_an_empty_buffer() -> None:
    got, packed = through_a_program(())
    assert got == ()
    assert packed.buffer.size == 0
