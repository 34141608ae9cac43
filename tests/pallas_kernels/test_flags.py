"""Every op under every flag of jax that an application may set: it computes what it computes without.

Cases are those of the benchmarks, one of each op and kind of step, at their small sizes: a new op is among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backends import BACKENDS
from pallas_kernels.cases.case import Case, Step, most_shards, of_step
from pallas_kernels.cases.compare import excess
from pallas_kernels.cases.find import case_types
from pallas_kernels.interpret import interpreted
from pallas_kernels.interpret.quick_callbacks import QUICK_COMPILE
from pallas_kernels.page_ops import zero_pages
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from tests.flags import FLAGS, OF_TRACING, ROUNDS_ELSEWHERE
from tests.pallas_kernels.cases import Shape, as_bytes, make_case

LAYOUTS = {"tpu": "tpu", "gpu": "gpu", "triton": "gpu"}  # of backends whose pages are not those of a CPU


@functools.cache
def cases(layout: str) -> dict[str, Case]:
    """By op and kind of step, of the first layer that has it."""
    found: dict[str, Case] = {}
    for op, case_type in case_types().items():
        for shape in case_type.shapes:
            for kind in case_type.kinds_of(shape):
                if f"{op} {kind}" not in found:
                    given = {"platform": layout, "page": 16, "dtype": "bfloat16", "q_dtype": "bfloat16"}
                    given["num_shards"] = most_shards(case_type, shape)
                    found[f"{op} {kind}"] = of_step(case_type, shape, kind, Step(small=True), **given)
    return found


def call_of(name: str, backend: str) -> tuple[Callable[..., Any], Any]:
    """A function that jax has not seen, and its arguments."""
    case = cases(LAYOUTS.get(backend, "cpu"))[name]
    return lambda pages, rest: case.call(backend, pages, rest), case.arguments(0)


def outcome(run: Callable[..., Any], arguments: Any) -> Any:
    """What `run` gives, or the words of its refusal."""
    try:
        return run(*arguments)
    except NotImplementedError as error:
        return str(error)


@functools.cache
def traced(name: str, backend: str) -> str:
    function, arguments = call_of(name, backend)
    return str(outcome(jax.make_jaxpr(function), arguments))


def compute(backend: str, function: Callable[..., Any], arguments: Any) -> Any:
    """Jitted; interpreters' programs are compiled as quickly as may be."""
    options = QUICK_COMPILE if backend in ("tpu", "gpu") else None
    with interpreted(backend):
        return jax.block_until_ready(outcome(jax.jit(function, compiler_options=options), arguments))


@functools.cache
def computed(name: str, backend: str) -> Any:
    return compute(backend, *call_of(name, backend))


# Of Pallas Mosaic GPU any product of a tile that a loop's index chooses keeps a tracer, in a program of jax alone too.
LEAKS_IN_JAX = ("gpu", "jax_check_tracer_leaks")


# jax's interpreter of GPU kernels hands Python's integers out of callbacks, which x64 makes int64 as it runs; and its
# callbacks make arrays of jax, now and then in the thread that has the guard.
NOT_INTERPRETED = (("gpu", "jax_enable_x64"), ("gpu", "jax_transfer_guard"))
IN_PLACE = ("gpu", "jax_disable_jit")  # kernels that write in place: jax has no such references outside `jit`


def backends_with(flags: Iterable[str], *impossible: tuple[str, str]) -> list[tuple[str, str]]:
    """Backends, each with every flag that jax can do there."""
    pairs = [(backend, flag) for backend in BACKENDS if backend != "auto" for flag in flags]
    return [pair for pair in pairs if pair not in (LEAKS_IN_JAX, *impossible)]


every_case = pytest.mark.parametrize("name", cases("cpu"))


@pytest.mark.parametrize(("backend", "flag"), backends_with(OF_TRACING))
@every_case
def test_an_op_is_the_same_program(name: str, backend: str, flag: str) -> None:
    """Flags of tracing change no operation, shape or dtype, in kernels too; nothing of 64 bits gets in."""
    expected, (function, arguments) = traced(name, backend), call_of(name, backend)
    with FLAGS[flag]():
        assert str(outcome(jax.make_jaxpr(function), arguments)) == expected


@pytest.mark.timeout(1_200)
@pytest.mark.parametrize(("backend", "flag"), backends_with(FLAGS, *NOT_INTERPRETED))
@every_case
def test_an_op_computes_the_same(name: str, backend: str, flag: str) -> None:
    """Bit for bit, in the same dtypes; where sums are rounded elsewhere, as close as kernels are to the reference."""
    expected, call = computed(name, backend), call_of(name, backend)
    with FLAGS[flag]():
        result = compute(backend, *call)
    if (backend, flag) == IN_PLACE and isinstance(result, str) and result != expected:
        assert result == "array ref with memory space only works inside of a `jit`."
    elif flag in ROUNDS_ELSEWHERE and not isinstance(expected, str):
        chex.assert_trees_all_equal_shapes_and_dtypes(result, expected)
        assert excess(result, expected) <= 1
    elif isinstance(expected, str):
        assert result == expected
    else:
        chex.assert_trees_all_equal(as_bytes(result), as_bytes(expected), strict=True)
        chex.assert_trees_all_equal_shapes_and_dtypes(result, expected)


def widened(tree: Any, numbers: Any) -> Any:
    """The tree with its arrays of int32 as int64 of a library."""
    return jax.tree.map(lambda x: numbers.asarray(np.asarray(x), "int64") if x.dtype == "int32" else x, tree)


@every_case
def test_integers_of_64_bits(name: str) -> None:
    """Those of numpy are taken as without the flag; those of jax, which there are with it alone, are refused."""
    case, arguments = cases("cpu")[name], call_of(name, "reference")[1]
    without = jax.eval_shape(lambda pages: case.call("reference", pages, widened(arguments.rest, np)), arguments.pages)
    with jax.enable_x64(True):
        got = jax.eval_shape(lambda pages: case.call("reference", pages, widened(arguments.rest, np)), arguments.pages)
        chex.assert_trees_all_equal_shapes_and_dtypes(got, without)
        of_jax = widened(arguments.rest, jnp)
        if jax.tree.leaves(of_jax) and any(x.dtype == "int64" for x in jax.tree.leaves(of_jax)):
            with pytest.raises(ValueError, match=r"of dtype int32, got int64; convert with \.astype\('int32'\)"):
                jax.eval_shape(functools.partial(case.call, "reference"), arguments.pages, of_jax)


def test_jax_finds_nan_that_stands_in_pages() -> None:
    """It looks at what a compiled program gives: any that gives such pages fails, attention that sees none does not."""
    arrays = make_case(0, Shape(), [(1, 30), (3, 9)]).arrays
    ids, op = jnp.array([1], jnp.int32), functools.partial(ragged_paged_attention, sm_scale=1.0, num_kv_heads=2)
    dirty = jnp.full((4, 4, 2, 16), jnp.nan)
    with FLAGS["jax_debug_nans"]():
        for program in (lambda pages, ids: pages, lambda pages, ids: zero_pages(pages, ids)):
            with pytest.raises(FloatingPointError, match="nan"):
                jax.jit(program)(dirty, ids)
        result = jax.jit(lambda *arrays: op(*arrays).out)(*arrays)
    chex.assert_tree_all_finite(result)
