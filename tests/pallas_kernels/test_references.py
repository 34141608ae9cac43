"""Laws of kernels' references by name: a body sees what its call was given, and a wrong name is an error."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.gpu.call import call as gpu_call
from pallas_kernels.references import named
from pallas_kernels.tpu.call import Operand, call


class Pair(NamedTuple):
    a: Any
    b: Any


class Refs(NamedTuple):
    first: Any
    pair: Pair
    other: Any = None


def test_references_come_back_by_name_whatever_the_order_of_operands() -> None:
    leaves, referring = named(Refs, [{"pair": Pair("x", "y")}, {"other": None, "first": "z"}])
    assert leaves == ["x", "y", "z"]
    assert referring([1, 2, 3]) == Refs(first=3, pair=Pair(1, 2), other=None)


def test_an_operand_that_a_field_has_a_default_for_may_be_left_out() -> None:
    assert named(Refs, [{"first": 0, "pair": Pair(1, 2)}])[1]([3, 4, 5]) == Refs(3, Pair(4, 5))


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ([{"first": 0}], "expected operands for pair, got none"),
        ([{"first": 0, "pair": 1}, {"first": 2}], "expected every operand once, got first twice"),
        ([{"first": 0, "pair": 1, "last": 2}], "expected operands out of its fields, got last"),
    ],
)
def test_names_are_those_of_the_class(operands: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=f"Refs: {message}"):
        named(Refs, operands)


class CallRefs(NamedTuple):
    scale: Any  # SMEM int32[1]
    tables: Pair  # [8, 128] each
    sums: Pair  # [8, 128] each
    unused: Any
    pages: Any  # HBM [2, 8, 128]
    arrived: Any


def test_a_call_gives_back_its_results_by_name() -> None:
    """Nested operands, one that is absent, and an array that is changed in place, over a grid of two dimensions."""

    def body(refs: CallRefs) -> None:
        assert refs.unused is None
        refs.sums.a[...] = refs.tables.a[...] + refs.tables.b[...]
        refs.sums.b[...] = refs.tables.a[...] * refs.scale[0].astype(jnp.float32)

        @pl.when(pl.program_id(1) == 1)
        def _() -> None:
            copy = pltpu.make_async_copy(refs.sums.a, refs.pages.at[1], refs.arrived)
            copy.start()
            copy.wait()

    whole = pl.BlockSpec((8, 128), lambda i, j, scale: (0, 0))
    ones, pages = jnp.ones((8, 128)), jnp.zeros((2, 8, 128))
    with pltpu.force_tpu_interpret_mode():
        results = call(
            body,
            CallRefs,
            name="sums",
            grid=(1, 2),
            scalars={"scale": jnp.array([5], jnp.int32)},
            inputs={"tables": Pair(Operand(ones, whole), Operand(2 * ones, whole)), "unused": None},
            outputs={"sums": Pair(*[Operand(jax.ShapeDtypeStruct((8, 128), jnp.float32), whole)] * 2)},
            scratch={"arrived": pltpu.SemaphoreType.DMA},
            in_place={"pages": pages},
            vmem_limit_bytes=1 << 20,
        )
    assert list(results) == ["sums", "pages"]
    assert (results["sums"].a == 3).all()
    assert (results["sums"].b == 5).all()
    assert (results["pages"] == jnp.stack([0 * ones, 3 * ones])).all()


class InPlace(NamedTuple):
    pages: Any
    states: Any = None
    sums: Any = None


@pytest.mark.parametrize(
    "operands",
    [
        {"in_place": {"pages": jnp.zeros(1), "states": jnp.zeros(1)}},
        {"in_place": {"pages": jnp.zeros(1)}, "scratch": {"sums": plgpu.SMEM((1,), jnp.float32)}},
        {"in_place": {"pages": jnp.zeros(1)}, "num_warpgroups": 2},
    ],
)
def test_a_gpu_kernel_changes_one_array_in_place_and_no_more(operands: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="sums: expected one array in place, no scratch and one warpgroup"):
        gpu_call(lambda refs: None, InPlace, name="sums", grid={"x": 1}, inputs={}, outputs={}, **operands)
