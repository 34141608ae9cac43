"""Ranks that each hold some tokens of every sequence give, merged, attention over all of them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.key_share import KeyShare
from pallas_kernels.merge_states import merge_ranks, merge_states
from pallas_kernels.mla_paged_attention import mla_paged_attention
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from tests.pallas_kernels import cases
from tests.pallas_kernels.cases import Shape, assert_close, make_case
from tests.pallas_kernels.latent_cases import LatentShape
from tests.pallas_kernels.mla_paged_attention import mla_cases
from tests.pallas_kernels.oracle import Options

ROWS = [(1, 37), (1, 1), (1, 0), (9, 9), (7, 30)]
SINKS = np.float32([0.5, -np.inf, 2.0, 0.0])


def pages_of_rank(pages: np.ndarray, rank: int, size: int, interleave: int) -> np.ndarray:
    """Of pages [pages, tokens of a column, ...] the tokens that lie on a rank, by the words of the contract."""
    own = [t for t in range(pages.shape[1]) if t // interleave % size == rank]
    return pages[:, own]


@pytest.mark.parametrize("interleave", [1, 2])
def test_positions_of_all_ranks_are_all_positions(interleave: int) -> None:
    found = [KeyShare(rank, 3, interleave).position(np.arange(8)) for rank in range(3)]
    assert sorted(np.concatenate(found).tolist()) == list(range(24))
    assert all((position // interleave % 3 == rank).all() for rank, position in enumerate(found))


@pytest.mark.parametrize(
    ("backend", "size", "interleave", "options"),
    [
        ("reference", 2, 1, Options(sliding_window=5, num_sink_tokens=3, soft_cap=2.0)),
        ("xla", 4, 2, Options(sliding_window=11)),
        pytest.param("reference", 4, 2, Options(attention_chunk_size=8), marks=pytest.mark.sweep),
        pytest.param("reference", 3, 1, Options(), marks=pytest.mark.sweep),
        pytest.param("xla", 2, 1, Options(), marks=pytest.mark.sweep),
    ],
)
def test_merged_parts_are_attention_over_all_tokens(backend: str, size: int, interleave: int, options: Options) -> None:
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
            context_interleave=interleave,
            return_lse=True,
            backend=backend,
        )
        return result.out, result.lse

    parts = [attend(rank, tuple(pages_of_rank(x, rank, size, interleave) for x in case.pages)) for rank in range(size)]
    outs, lses = (list(x) for x in zip(*parts, strict=True))
    assert_close(merge_states(outs, lses, sinks=jnp.asarray(SINKS)).out, expected, "float32", "out")
    merge = functools.partial(merge_ranks, axis_name="rank", sinks=jnp.asarray(SINKS))
    for merged in jax.vmap(merge, axis_name="rank")(jnp.stack(outs), jnp.stack(lses)):
        assert_close(merged, expected, "float32", "out")


@pytest.mark.parametrize("backend", ["reference", pytest.param("xla", marks=pytest.mark.sweep)])
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

    parts = [attend(rank, jnp.asarray(pages_of_rank(case.page, rank, size, 1))) for rank in range(size)]
    merged = merge_states(*(list(x) for x in zip(*parts, strict=True)), return_lse=True)
    expected, lse = case.expected(options)
    assert_close(merged.out, expected, "float32", "out")
    assert_close(merged.lse, lse, "float32", "lse")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_size": 0}, "expected context_size to be an integer >= 1, got 0"),
        ({"context_rank": 2, "context_size": 2}, r"expected context_rank in \[0, 2\), got 2"),
        (
            {"context_size": 2, "context_interleave": 3},
            "expected context_interleave to divide the page_size of 4, got 3",
        ),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, int], message: str) -> None:
    case = cases.make_case(0, Shape(), [(1, 3)])
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(*case.arrays, sm_scale=1.0, **options)


def test_kernels_without_it_say_so() -> None:
    case = cases.make_case(0, Shape(platform="tpu", head_dim=128), [(1, 3)])
    with pytest.raises(NotImplementedError, match="context_size > 1"):
        ragged_paged_attention(*case.arrays, sm_scale=1.0, num_kv_heads=2, context_size=2, backend="tpu")
