"""The plan of a step on the GPU: results are the oracle's with and without it, and what depends on lengths is in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gpu.shares import share_out
from pallas_kernels.interpret.on_gpu import compile_on_gpu
from pallas_kernels.ragged_paged_attention import MaskRule, kernel_gpu, plan, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.gpu_schedule import GpuSchedule
from pallas_kernels.ragged_paged_attention.oracle import Options
from tests.pallas_kernels.cases import Shape, assert_right, make_case, nan_behind

SMALL = kernel_gpu.Tuning(decode_block=64, decode_stages=2, num_blocks=3, prefill_block=64, prefill_stages=2)
SHAPE = Shape(
    num_tokens=24, num_rows=4, num_columns=9, page_size=16, num_q_heads=4, num_kv_heads=2, head_dim=64,
    q_dtype="bfloat16", kv_dtype="bfloat16",
)  # fmt: skip
DECODE = replace(SHAPE, num_tokens=4)
FEW = replace(SHAPE, num_tokens=12)
MASK = MaskRule(sliding_window=70)
OPTIONS = Options(sliding_window=70, sinks=np.array([0.5, -1.0, 2.0, -np.inf]), k_scale=0.7, v_scale=1.3)
# What a layer may do beside kernels: bring queries into the shape of tiles.
MOVES = {
    *("reshape", "convert_element_type", "pad", "slice", "broadcast_in_dim", "gather", "transpose"),
    *("add", "lt", "max", "select_n"),  # of indices in the gather
    *("new_ref", "freeze"),  # around the merge, which writes in place
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with more blocks than stages, as small as they can be."""
    for name in ("plan", "ragged_paged_attention"):
        monkeypatch.setattr(kernel_gpu, name, functools.partial(getattr(kernel_gpu, name), tuning=SMALL))


def planned(shape: Shape, *, is_decode: bool, return_lse: bool) -> Callable[..., Any]:
    """(arrays of a case) -> (out, lse) of two layers with one plan: the second attends to twice the queries' size."""

    def call(q: jax.Array, pages: Any, *step: jax.Array) -> Any:
        schedule = plan(q, pages, *step, MASK, is_decode=is_decode, backend="gpu")
        options = {"sinks": jnp.asarray(OPTIONS.sinks, jnp.float32), "k_scale": jnp.float32(0.7)}
        options |= {"v_scale": jnp.float32(1.3), "sm_scale": OPTIONS.sm_scale, "return_lse": return_lse}
        result = ragged_paged_attention(q, pages, *step, **options, sliding_window=70, schedule=schedule, backend="gpu")
        return result.out, result.lse

    return compile_on_gpu(call, *make_case(0, shape, []).arrays)


def test_a_mixed_step_with_a_plan_equals_the_oracle() -> None:
    """Decoding between longer sequences' tokens, padding behind them, a row that decodes without a query; with LSE."""
    run = planned(SHAPE, is_decode=False, return_lse=True)
    for seed, rows in ((1, [(1, 130), (1, 5), (9, 40)]), (2, [(0, 7), (1, 66), (20, 20)])):
        case = nan_behind(make_case(seed, SHAPE, rows, OPTIONS))
        assert_right(run(*case.arrays), case.expected(OPTIONS), case.shape.q_dtype)


def test_a_step_of_decoding_has_no_tiles_and_equals_the_oracle() -> None:
    """Fewer sequences than rows: the rows behind them give 0, and -inf as LSE."""
    run = planned(DECODE, is_decode=True, return_lse=True)
    for seed, rows in ((1, [(1, 130), (1, 5), (1, 66)]), (2, [])):
        case = nan_behind(make_case(seed, DECODE, rows, OPTIONS))
        assert_right(run(*case.arrays), case.expected(OPTIONS), case.shape.q_dtype)


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, and of those inside it, but for kernels'."""
    for equation in jaxpr.eqns:
        if is_kernel(equation):
            yield equation
            continue
        inner = [x for x in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr) if is_jaxpr(x)]
        if not inner:
            yield equation
        for one in inner:
            yield from equations(getattr(one, "jaxpr", one))


def is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")


def is_kernel(equation: Any) -> bool:
    return equation.primitive.name in ("pallas_call", "mpmd_map", "core_map")


def layer_equations(shape: Shape, *, is_decode: bool) -> list[Any]:
    """Of a layer whose step is planned."""
    q, pages, *step = make_case(0, shape, []).arrays
    schedule = jax.eval_shape(lambda *step: plan(q, pages, *step, MASK, is_decode=is_decode, backend="gpu"), *step)

    def layer(q: Any, pages: Any, schedule: Any, sinks: Any, scale: Any, *step: Any) -> Any:
        options = {"sm_scale": 0.1, "sliding_window": 70, "sinks": sinks, "k_scale": scale, "v_scale": scale}
        return ragged_paged_attention(q, pages, *step, **options, schedule=schedule, backend="gpu").out

    scalars = (jnp.zeros(shape.num_q_heads), jnp.float32(1.0))
    return list(equations(jax.make_jaxpr(layer)(q, pages, schedule, *scalars, *step).jaxpr))


@pytest.mark.parametrize(("shape", "is_decode", "num_kernels"), [(DECODE, True, 2), (FEW, True, 2), (SHAPE, False, 3)])
def test_a_planned_layer_is_kernels_and_moves(shape: Shape, is_decode: bool, num_kernels: int) -> None:
    """No sum, sort or comparison of lengths, and where all decode no prefill; compiled: `gpu_compile.py layers`."""
    found = layer_equations(shape, is_decode=is_decode)
    assert sum(map(is_kernel, found)) == num_kernels
    others = {equation.primitive.name for equation in found if not is_kernel(equation)}
    assert others <= MOVES


def test_a_plan_is_for_its_sizes() -> None:
    """Equal schedules for layers of one kind; another mask, page size or number of tokens is an error."""
    q, pages, *step = make_case(0, SHAPE, [(1, 9), (3, 5)]).arrays
    schedule = plan(q, pages, *step, MASK, backend="gpu")
    assert isinstance(schedule, GpuSchedule)
    call = functools.partial(ragged_paged_attention, sm_scale=0.1, backend="gpu", schedule=schedule)
    with pytest.raises(ValueError, match=r"ragged_paged_attention: expected a schedule planned for .*; plan it again"):
        jax.eval_shape(functools.partial(call, sliding_window=71), q, pages, *step)
    with pytest.raises(ValueError, match=r"expected a schedule planned for .*num_tokens=16"):
        jax.eval_shape(functools.partial(call, sliding_window=70), q[:16], pages, *step)
    with pytest.raises(ValueError, match=r"expected schedule to be what plan\(\) returns, got tuple"):
        ragged_paged_attention(q, pages, *step, sm_scale=0.1, backend="gpu", schedule=())


def test_only_steps_of_decoding_are_planned_as_such() -> None:
    """As many tokens as sequences, or a multiple, and where lengths are known, no more for any."""
    q, pages, *step = make_case(0, SHAPE, [(1, 9), (3, 5)]).arrays
    with pytest.raises(ValueError, match="with is_decode=True, or a multiple, got 22 and 4"):
        plan(q[:22], pages, *step, MASK, is_decode=True, backend="gpu")
    q, pages, *step = make_case(0, SHAPE, [(1, 9), (7, 9)]).arrays
    with pytest.raises(ValueError, match=r"at most 6 queries of every sequence .* and 24 tokens, got query"):
        plan(q, pages, *step, MASK, is_decode=True, backend="gpu")
    q, pages, *step = make_case(0, DECODE, [(1, 9), (3, 5)]).arrays
    with pytest.raises(ValueError, match="expected one query of every sequence with is_decode=True, got query_start"):
        plan(q, pages, *step, MASK, is_decode=True, backend="gpu")


@pytest.mark.parametrize("backend", ["auto", "reference", "tpu"])
def test_other_backends_have_nothing_to_plan(backend: str) -> None:
    shape = replace(SHAPE, q_dtype="float32", kv_dtype="float32", platform="tpu", head_dim=128)
    q, pages, *step = make_case(0, shape, [(1, 9)]).arrays
    assert plan(q, pages, *step, MASK, num_kv_heads=2, backend=backend) is None


@pytest.mark.parametrize("seed", range(5))
def test_units_of_equal_counts_share_as_if_counted_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = jnp.asarray(rng.integers(0, 9, 7), jnp.int32)
    together, apart = share_out(counts, 5, repeats=3), share_out(jnp.repeat(counts, 3), 5)
    for one, other in zip(together, apart, strict=True):
        np.testing.assert_array_equal(one, other)
