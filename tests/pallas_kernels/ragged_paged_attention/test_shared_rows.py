"""Attention over pages where two tokens of one 8-bit head share rows of words, against the float64 oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.pages import by_token, with_tokens
from pallas_kernels.interpret.on_tpu import compile_on_tpu
from pallas_kernels.mask import MaskRule
from pallas_kernels.ragged_paged_attention import kernel_tpu, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.oracle import Options
from pallas_kernels.ragged_paged_attention.tpu_plan import block_slots, ring_buffers
from tests.pallas_kernels.cases import Shape, assert_close, assert_matches_oracle, make_case, random_values
from tests.pallas_kernels.ragged_paged_attention.test_kernel_tpu import SMALL_BLOCKS, assert_right, compiled

SHAPE = Shape(
    num_tokens=24, num_rows=4, num_columns=20, page_size=16, num_q_heads=5, num_kv_heads=1, head_dim=80,
    q_dtype="bfloat16", kv_dtype="float8_e4m3fn", platform="tpu",
)  # fmt: skip
SCALES = Options(k_scale=np.array([0.5], np.float32), v_scale=np.array([1.5], np.float32))
# Lengths that end inside a word, in an odd number of pages, and queries that start at odd positions.
MIXED = [(1, 301), (1, 17), (9, 134), (13, 13)]
CASES: dict[str, tuple[dict[str, Any], Options, list[tuple[int, int]]]] = {
    "mixed": ({}, SCALES, MIXED),
    "int8, a window": (
        {"kv_dtype": "int8", "page_size": 8, "num_columns": 38},
        dataclasses.replace(SCALES, sliding_window=37, num_sink_tokens=5),
        MIXED,
    ),
    "decode, pages of 128": (
        {"page_size": 128, "num_columns": 3, "num_tokens": 4},
        SCALES,
        [(1, 383), (1, 129), (1, 1), (1, 256)],
    ),
    "prefill, 192 numbers, float32": (
        {"head_dim": 192, "kv_dtype": "float8_e5m2", "q_dtype": "float32"},
        dataclasses.replace(SCALES, attention_chunk_size=33),
        [(21, 150)],
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_right(name: str) -> None:
    """NaN, or 127, in every slot that nobody sees, the other halves of words among them."""
    change, options, rows = CASES[name]
    shape = dataclasses.replace(SHAPE, **change)
    run = compiled(shape, options, SMALL_BLOCKS)
    case = make_case(1, shape, rows, options)
    assert_right(run(*case.arrays), case, options)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "mixed" else [pytest.mark.sweep]) for name in CASES]
)
def test_the_reference_is_right(name: str) -> None:
    change, options, rows = CASES[name]
    shape = dataclasses.replace(SHAPE, **{**change, "q_dtype": "float32"})
    assert_matches_oracle(make_case(2, shape, rows, options), options)


def test_one_query_row_reads_pages_in_place() -> None:
    """One query head decodes: `page_rows` reads values slot by slot."""
    shape = dataclasses.replace(SHAPE, num_q_heads=1, num_tokens=4, q_dtype="float32")
    assert_matches_oracle(make_case(3, shape, [(1, 301), (1, 17), (1, 2)], SCALES), SCALES)


@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.sweep), "tpu"])
def test_new_kv_fills_the_other_halves_of_words(backend: str) -> None:
    """A decoding token completes a word, several begin and end inside words: all see the new ones; the rest is kept."""
    rows = [(1, 302), (5, 20), (7, 140)]
    case = make_case(5, SHAPE, rows)
    new = [random_values(np.random.default_rng(n), (24, 1, 80), "float8_e4m3fn").astype(np.float32) for n in range(2)]
    slots = np.full(24, -1, np.int32)
    before, after = (by_token(case.pages[0], 1, 80) for _ in range(2))
    for s, (q_len, seq_len) in enumerate(rows):
        for t, pos in enumerate(range(seq_len - q_len, seq_len)):
            token = int(case.query_start_loc[s]) + t
            page, place = case.block_tables[s, pos // 16], pos % 16
            slots[token] = page * 16 + place
            before[page, place] = np.nan
            after[page, place] = np.zeros((), after.dtype)
            after[page, place, :, :80] = np.stack([x[token, 0] for x in new]).astype(after.dtype)
    case = dataclasses.replace(case, pages=(with_tokens(case.pages[0], 1, before),))
    pages = with_tokens(case.pages[0], 1, after)

    def step(*arrays: Any) -> Any:
        *arrays, k, v, slots = arrays
        options = {"slot_mapping": slots, "num_kv_heads": 1, "sm_scale": 0.125, "return_lse": True}
        return ragged_paged_attention(*arrays, new_kv=(k, v), **options, backend=backend)

    arguments = (*case.arrays, *(jnp.asarray(x) for x in (*new, slots)))
    out, lse, (written,) = (compile_on_tpu(step, *arguments) if backend == "tpu" else step)(*arguments)
    np.testing.assert_array_equal(np.asarray(written).view(np.uint8), pages.view(np.uint8))
    case = dataclasses.replace(case, pages=(pages,))
    expected = case.expected(Options())
    assert_close(out, expected[0], "bfloat16", "out")
    assert_close(lse, expected[1], "bfloat16 weights", "lse")


@pytest.mark.parametrize("page_size", [4, 24])
def test_page_sizes_are_counted_in_tokens(page_size: int) -> None:
    """What the kernel refuses is a page's tokens, not its rows of words."""
    case = make_case(0, dataclasses.replace(SHAPE, page_size=page_size), [])
    with pytest.raises(NotImplementedError, match=f"powers of two from 8 to 512, got {page_size}"):
        jax.eval_shape(lambda *a: ragged_paged_attention(*a, num_kv_heads=1, sm_scale=1.0, backend="tpu"), *case.arrays)


def test_decoding_blocks_of_one_head_keep_hbm_busy() -> None:
    """A ring of eight blocks of 256 bytes a token has 4 MiB, as rings of wider tokens have."""
    for token_bytes, slots in ((256, 2048), (512, 1024), (1024, 1024), (4096, 512)):
        block = block_slots(MaskRule(), 1, 1024, 128, token_bytes, kernel_tpu._PAIR_BYTES)
        assert block == slots
        assert block * token_bytes * ring_buffers(block * token_bytes, kernel_tpu._RING_BYTES) >= 4 << 20
