"""Ranks that each hold some tokens of every sequence give, merged, attention over all of them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.latents import LatentShape
from pallas_kernels.interpret.on_tpu import compile_on_tpu
from pallas_kernels.key_share import KeyShare
from pallas_kernels.merge_states import merge_ranks, merge_states
from pallas_kernels.mla_paged_attention import kernel_tpu as mla_tpu
from pallas_kernels.mla_paged_attention import mla_paged_attention
from pallas_kernels.ragged_paged_attention import kernel_tpu, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.oracle import Options
from tests.pallas_kernels import cases
from tests.pallas_kernels.cases import Shape, assert_close, make_case, static_of
from tests.pallas_kernels.mla_paged_attention import mla_cases
from tests.pallas_kernels.mla_paged_attention.test_kernel_tpu import SMALL as SMALL_LATENTS
from tests.pallas_kernels.ragged_paged_attention.test_kernel_tpu import SMALL_BLOCKS

ROWS = [(1, 37), (1, 1), (1, 0), (9, 9), (7, 30)]
SINKS = np.float32([0.5, -np.inf, 2.0, 0.0])


def test_positions_of_all_ranks_are_all_positions() -> None:
    found = [KeyShare(rank, 3).position(np.arange(8)) for rank in range(3)]
    assert sorted(np.concatenate(found).tolist()) == list(range(24))
    assert all((position % 3 == rank).all() for rank, position in enumerate(found))


@pytest.mark.parametrize(
    ("backend", "size", "options"),
    [
        ("reference", 2, Options(sliding_window=5, num_sink_tokens=3, soft_cap=2.0)),
        ("xla", 4, Options(sliding_window=11)),
        ("triton", 4, Options(sliding_window=11)),
        pytest.param("reference", 4, Options(attention_chunk_size=8), marks=pytest.mark.sweep),
        pytest.param("reference", 3, Options(), marks=pytest.mark.sweep),
        pytest.param("xla", 2, Options(), marks=pytest.mark.sweep),
    ],
)
def test_merged_parts_are_attention_over_all_tokens(backend: str, size: int, options: Options) -> None:
    """Slots of NaN that nobody sees, and null pages, stay without effect; sinks are counted once."""
    case = make_case(0, Shape(num_tokens=24, page_size=4 * size, num_columns=5), ROWS, options)
    expected, _ = case.expected(Options(**{**vars(options), "sinks": SINKS}))

    @jax.jit
    def attend(rank: jax.Array, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array | None]:
        result = ragged_paged_attention(
            case.arrays[0],
            pages,
            *case.arrays[2:],
            sm_scale=options.sm_scale,
            sliding_window=options.sliding_window,
            attention_chunk_size=options.attention_chunk_size,
            num_sink_tokens=options.num_sink_tokens,
            soft_cap=options.soft_cap,
            context_rank=rank,
            context_size=size,
            return_lse=True,
            backend=backend,
        )
        return result.out, result.lse

    parts = [attend(rank, case.of_rank(rank, size).arrays[1]) for rank in range(size)]
    outs, lses = (list(x) for x in zip(*parts, strict=True))
    assert_close(merge_states(outs, lses, sinks=jnp.asarray(SINKS)).out, expected, "float32", "out")
    merge = functools.partial(merge_ranks, axis_name="rank", sinks=jnp.asarray(SINKS))
    for merged in jax.vmap(merge, axis_name="rank")(jnp.stack(outs), jnp.stack(lses)):
        assert_close(merged, expected, "float32", "out")


@pytest.mark.parametrize(
    "backend", ["reference", *(pytest.param(x, marks=pytest.mark.sweep) for x in ("xla", "triton"))]
)
def test_merged_parts_of_latents_are_attention_over_all(backend: str) -> None:
    options, size = Options(), 2
    shape = mla_cases.Shape(num_columns=5, latent=LatentShape(page_size=4 * size))
    case = mla_cases.make_case(0, shape, ROWS, options)

    @jax.jit
    def attend(rank: jax.Array, page: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        shared: dict[str, Any] = {"context_rank": rank, "context_size": size, "return_lse": True, "backend": backend}
        arrays = (*case.arrays[:2], (page,), *case.arrays[3:])
        result = mla_paged_attention(*arrays, sm_scale=options.sm_scale, **shared)
        return result.out, result.lse

    parts = [attend(rank, *case.of_rank(rank, size).arrays[2]) for rank in range(size)]
    merged = merge_states(*(list(x) for x in zip(*parts, strict=True)), return_lse=True)
    expected, lse = case.expected(options)
    assert_close(merged.out, expected, "float32", "out")
    assert_close(merged.lse, lse, "float32", "lse")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_size": 0}, "expected context_size to be an integer >= 1, got 0"),
        ({"context_rank": 2, "context_size": 2}, r"expected context_rank in \[0, 2\), got 2"),
        ({"context_size": 2, "sinks": SINKS}, "expected no sinks with context_size 2: give them to merge_states"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    case = cases.make_case(0, Shape(), [(1, 3)])
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(*case.arrays, sm_scale=1.0, **options)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_ranks_tokens_are_counted(size: int) -> None:
    for rank in range(size):
        own = [t % size == rank for t in range(50)]
        share = KeyShare(rank, size)
        assert [int(share.count(end)) for end in range(50)] == [sum(own[:end]) for end in range(50)]


@pytest.mark.parametrize(
    ("size", "options"),
    [
        pytest.param(2, Options(sliding_window=20, num_sink_tokens=21, soft_cap=1.5), marks=pytest.mark.sweep),
        pytest.param(4, Options(attention_chunk_size=24), marks=pytest.mark.sweep),
        pytest.param(4, Options(causal=False), marks=pytest.mark.sweep),
        pytest.param(2, Options(), marks=pytest.mark.sweep),
    ],
)
def test_the_tpu_kernel_attends_over_the_tokens_of_a_rank(size: int, options: Options) -> None:
    """Key by key in float64 of each rank, which is traced; more than a block of keys, and rows that hold none."""
    shape = Shape(24, 5, 20, 16 * size, 4, 2, 64, q_dtype="bfloat16", kv_dtype="bfloat16", platform="tpu")
    case = make_case(0, shape, [(1, 317), (1, 1), (1, 0), (9, 9), (11, 190)], options)

    def attend(rank: jax.Array, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array | None]:
        share = KeyShare(rank, size)
        static = static_of(options) | {"num_kv_heads": 2, "v_scale": None, "tuning": SMALL_BLOCKS}
        arrays = (case.arrays[0], pages, *case.arrays[2:])
        return kernel_tpu.ragged_paged_attention(*arrays, **static, return_lse=True, share=share)[:2]

    parts = [case.of_rank(rank, size).arrays[1] for rank in range(size)]
    run = compile_on_tpu(attend, jnp.int32(0), parts[0], watch_races=size > 2)
    for rank, pages in enumerate(parts):
        out, lse = case.expected(dataclasses.replace(options, held_by=(rank, size)))
        result = run(jnp.int32(rank), pages)
        assert_close(result[0], out, "bfloat16", "out")
        assert_close(result[1], lse, "bfloat16 weights", "lse")


@pytest.mark.sweep
@pytest.mark.parametrize("size", [2, 4])
def test_the_tpu_kernel_attends_over_two_tokens_a_word_of_a_rank(size: int) -> None:
    """Pages of 8 bits and one KV head, whose slots of a block are numbered tokens of even place first."""
    options = Options(sliding_window=90, num_sink_tokens=21)
    shape = Shape(24, 5, 20, 16 * size, 4, 1, 64, q_dtype="bfloat16", kv_dtype="float8_e4m3fn", platform="tpu")
    case = make_case(0, shape, [(1, 317), (1, 1), (1, 0), (9, 9), (11, 190)], options)

    def attend(rank: jax.Array, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array | None]:
        static = static_of(options) | {"num_kv_heads": 1, "v_scale": None, "tuning": SMALL_BLOCKS}
        arrays = (case.arrays[0], pages, *case.arrays[2:])
        share = KeyShare(rank, size)
        return kernel_tpu.ragged_paged_attention(*arrays, **static, return_lse=True, share=share)[:2]

    parts = [case.of_rank(rank, size).arrays[1] for rank in range(size)]
    run = compile_on_tpu(attend, jnp.int32(0), parts[0])
    for rank, pages in enumerate(parts):
        out, lse = case.expected(dataclasses.replace(options, held_by=(rank, size)))
        result = run(jnp.int32(rank), pages)
        assert_close(result[0], out, "bfloat16", "out")
        assert_close(result[1], lse, "bfloat16 weights", "lse")


@pytest.mark.parametrize(
    "options", [Options(sliding_window=37), pytest.param(Options(num_sink_tokens=5), marks=pytest.mark.sweep)]
)
def test_the_tpu_kernel_attends_over_the_latents_of_a_rank(options: Options) -> None:
    size = 2
    shape = mla_cases.Shape(24, 5, 20, 3, 8, "bfloat16", LatentShape(32, 16 * size, "bfloat16", "tpu"))
    case = mla_cases.make_case(0, shape, [(1, 317), (1, 1), (1, 0), (9, 9), (11, 190)], options)

    def attend(rank: jax.Array, page: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        static = static_of(options) | {"page_size": 16, "tuning": SMALL_LATENTS, "return_lse": True}
        arrays = (*case.arrays[:2], (page,), *case.arrays[3:])
        return mla_tpu.mla_paged_attention(*arrays, **static, share=KeyShare(rank, size))

    pages = [case.of_rank(rank, size).arrays[2][0] for rank in range(size)]
    run = compile_on_tpu(attend, jnp.int32(0), pages[0], watch_races=bool(options.num_sink_tokens))
    for rank, page in enumerate(pages):
        out, lse = case.expected(dataclasses.replace(options, held_by=(rank, size)))
        result = run(jnp.int32(rank), page)
        assert_close(result[0], out, "bfloat16", "out")
        assert_close(result[1], lse, "bfloat16 weights", "lse")


@pytest.mark.parametrize(
    ("backend", "size", "message"),
    [("tpu", 3, "a power of two as context_size, got 3"), ("gpu", 2, "context_size > 1")],
)
def test_kernels_without_it_say_so(backend: str, size: int, message: str) -> None:
    case = cases.make_case(0, Shape(platform="tpu", head_dim=128, page_size=16), [(1, 3)])
    with pytest.raises(NotImplementedError, match=message):
        ragged_paged_attention(*case.arrays, sm_scale=1.0, num_kv_heads=2, context_size=size, backend=backend)
