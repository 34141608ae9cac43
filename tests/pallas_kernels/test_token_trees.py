"""Drafts that are a tree: each query attends as if its path were the sequence, key by key in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.key_share import KeyShare
from pallas_kernels.mla_paged_attention import kernel_tpu as mla_tpu
from pallas_kernels.mla_paged_attention import mla_paged_attention
from pallas_kernels.ragged_paged_attention import kernel_tpu, ragged_paged_attention
from scripts.kernel_fuzz.attention import static_of
from tests.pallas_kernels import cases
from tests.pallas_kernels.cases import Shape, assert_close, make_case
from tests.pallas_kernels.latent_cases import LatentShape
from tests.pallas_kernels.mla_paged_attention import mla_cases
from tests.pallas_kernels.mla_paged_attention.test_kernel_tpu import SMALL as SMALL_LATENTS
from tests.pallas_kernels.on_tpu import compile_on_tpu
from tests.pallas_kernels.oracle import Options
from tests.pallas_kernels.ragged_paged_attention.test_kernel_tpu import SMALL_BLOCKS
from tests.pallas_kernels.token_trees import random_trees

SMALL = np.array([1 / 64], np.float32)  # a scale of int8 pages
ROWS = [(1, 37), (5, 44), (7, 7), (11, 30)]
# Decoding, a short tree, one at the beginning, the longest, a prefill of more than 32.
LONG_ROWS = [(1, 37), (5, 44), (7, 7), (32, 60), (35, 48)]
SHAPE, LONG = Shape(24, 4, 12, num_q_heads=2, num_kv_heads=1), Shape(90, 6, 16, num_q_heads=2, num_kv_heads=1)
MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"sliding_window": 4},
    {"sliding_window": 3, "num_sink_tokens": 46},
    {"attention_chunk_size": 5},
    {"attention_chunk_size": 8, "sliding_window": 11, "num_sink_tokens": 2},
)


@pytest.mark.parametrize(("mask", "backend"), [(MASKS[2], "reference"), (MASKS[4], "xla"), (MASKS[4], "triton")])
def test_queries_see_their_paths(mask: dict[str, Any], backend: str) -> None:
    """Chains, stars, trees and what is no path, beside sequences without one."""
    _assert_paths(mask, backend, SHAPE, ROWS, 0)


@pytest.mark.sweep
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", ["reference", "xla", "triton"])
def test_queries_see_their_paths_under_every_mask(mask: dict[str, Any], backend: str) -> None:
    for seed in range(3):
        _assert_paths(mask, backend, LONG, LONG_ROWS, seed)


def _assert_paths(mask: dict[str, Any], backend: str, shape: Shape, rows: list[tuple[int, int]], seed: int) -> None:
    options = Options(**mask)
    case = make_case(seed, shape, rows, options)
    trees = random_trees(np.random.default_rng(seed), rows, shape.num_tokens)
    result = run_reference(case, options, trees) if backend == "reference" else run_by(backend, case, options, trees)
    out, lse = case.expected(options, trees)
    assert_close(result.out, out, "float32", "out")
    assert_close(result.lse, lse, "float32", "lse")


def run_reference(case: cases.Case, options: Options, trees: np.ndarray) -> Any:
    return cases.run(case, options, tree_mask=jnp.asarray(trees))


def run_by(backend: str, case: cases.Case, options: Options, trees: np.ndarray) -> Any:
    static = {name: getattr(options, name) for name in ("sm_scale", "sliding_window", "attention_chunk_size")}
    static |= {"num_sink_tokens": options.num_sink_tokens, "return_lse": True, "backend": backend}
    return ragged_paged_attention(*case.arrays, tree_mask=jnp.asarray(trees), **static)


def test_sequences_of_few_tokens_may_be_trees() -> None:
    """A step whose shape says that every sequence has at most four new tokens."""
    options, rows = Options(sliding_window=6), [(4, 37), (3, 3), (4, 20), (1, 9)]
    case = make_case(0, Shape(16, 4, 12, num_q_heads=2, num_kv_heads=1), rows, options)
    trees = random_trees(np.random.default_rng(3), rows, 16)
    result = cases.run(case, options, tree_mask=jnp.asarray(trees))
    assert_close(result.out, case.expected(options, trees)[0], "float32", "out")


def test_a_chain_is_what_causal_tokens_see() -> None:
    """To the last bit."""
    case = make_case(0, Shape(24, 5, 12), [(1, 9), (12, 40), (9, 9)], Options())
    chain = np.zeros(24, np.uint32)
    chain[1:13] = (2 << np.arange(12)) - 1
    trees = cases.run(case, Options(), tree_mask=jnp.asarray(chain))
    np.testing.assert_array_equal(trees.out, cases.run(case, Options()).out)


@pytest.mark.parametrize("held_by", [None, (1, 2, 1)])
def test_latents_are_seen_as_keys_are(held_by: tuple[int, int, int] | None) -> None:
    """On one rank of two as well."""
    options = Options(sliding_window=9, held_by=held_by)
    shape = mla_cases.Shape(24, 4, 12, num_q_heads=2, latent=LatentShape(page_size=4))
    case = mla_cases.make_case(0, shape, ROWS, options)
    trees = random_trees(np.random.default_rng(0), ROWS, 24)
    rank, size, interleave = held_by or (0, 1, 1)
    static = {"sm_scale": options.sm_scale, "sliding_window": 9, "context_rank": rank, "context_size": size}
    arrays = case.of_rank(rank, size, interleave).arrays
    result = mla_paged_attention(*arrays, tree_mask=jnp.asarray(trees), return_lse=True, **static)
    out, lse = case.expected(options, trees)
    assert_close(result.out, out, "float32", "out")
    assert_close(result.lse, lse, "float32", "lse")


@pytest.mark.parametrize(
    ("options", "tokens", "kv_dtype"),
    [
        (Options(sliding_window=20, num_sink_tokens=4), 24, "float8_e4m3fn"),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in (
                (Options(sliding_window=20, num_sink_tokens=4), 24, "bfloat16"),
                (Options(), 90, "bfloat16"),
                (Options(sliding_window=3, num_sink_tokens=125, soft_cap=1.5), 90, "bfloat16"),
                (Options(attention_chunk_size=8), 90, "bfloat16"),
                (Options(sliding_window=50, held_by=(1, 2, 1)), 90, "bfloat16"),
                (Options(attention_chunk_size=30, held_by=(2, 4, 8)), 90, "bfloat16"),
                (Options(attention_chunk_size=8), 90, "float8_e5m2"),
                (Options(sliding_window=50, held_by=(1, 2, 1)), 90, "float8_e4m3fn"),
                (Options(held_by=(2, 4, 8), k_scale=SMALL, v_scale=SMALL), 90, "int8"),
            )
        ),
    ],
)
def test_the_tpu_kernel_knows_trees(options: Options, tokens: int, kv_dtype: str) -> None:
    """Of two tiles and two blocks, beside sequences without one, on a rank; 8 bits: two tokens a row of words."""
    rows = [(1, 137), (5, 144), (7, 7), (11, 130)] if tokens == 24 else [*LONG_ROWS[:3], (32, 130), (35, 148)]
    rank, size, interleave = options.held_by or (0, 1, 1)
    sizes: dict[str, Any] = {"q_dtype": "bfloat16", "kv_dtype": kv_dtype, "platform": "tpu"}
    shape = Shape(tokens, len(rows), 12, 16 * size, 2, 1, 64, **sizes)
    case = make_case(1, shape, rows, options)
    static = static_of(options) | {"num_kv_heads": 1, "v_scale": options.v_scale, "tuning": SMALL_BLOCKS}
    static["return_lse"] = True
    share = KeyShare(rank, size, interleave) if size > 1 else None

    def attend(trees: jax.Array, *arrays: Any) -> Any:
        return kernel_tpu.ragged_paged_attention(*arrays, **static, share=share, tree_mask=trees)[:2]

    arrays = case.of_rank(rank, size, interleave).arrays
    run = compile_on_tpu(attend, jnp.zeros(tokens, jnp.uint32), *arrays, watch_races=tokens > 24)
    for seed in range(3):
        trees = random_trees(np.random.default_rng(seed), rows, tokens)
        out, lse = case.expected(options, trees)
        result = run(jnp.asarray(trees), *arrays)
        assert_close(result[0], out, "bfloat16", "out")
        assert_close(result[1], lse, "bfloat16 weights", "lse")


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        pytest.param(Options(sliding_window=20), 24, marks=pytest.mark.sweep),
        pytest.param(Options(), 90, marks=pytest.mark.sweep),
        pytest.param(Options(attention_chunk_size=30, held_by=(1, 2, 4)), 90, marks=pytest.mark.sweep),
    ],
)
def test_the_tpu_kernel_knows_trees_over_latents(options: Options, tokens: int) -> None:
    rows = [(1, 137), (5, 144), (7, 7), (11, 130)] if tokens == 24 else [*LONG_ROWS[:3], (32, 130), (35, 148)]
    rank, size, interleave = options.held_by or (0, 1, 1)
    shape = mla_cases.Shape(tokens, len(rows), 12, 3, 8, "bfloat16", LatentShape(32, 16 * size, "bfloat16", "tpu"))
    case = mla_cases.make_case(1, shape, rows, options)
    static = static_of(options) | {"page_size": 16, "tuning": SMALL_LATENTS, "return_lse": True}
    share = KeyShare(rank, size, interleave) if size > 1 else None

    def attend(trees: jax.Array, *arrays: Any) -> Any:
        return mla_tpu.mla_paged_attention(*arrays, **static, share=share, tree_mask=trees)

    arrays = case.of_rank(rank, size, interleave).arrays
    run = compile_on_tpu(attend, jnp.zeros(tokens, jnp.uint32), *arrays, watch_races=tokens > 24)
    for seed in range(3):
        trees = random_trees(np.random.default_rng(seed), rows, tokens)
        out, lse = case.expected(options, trees)
        result = run(jnp.asarray(trees), *arrays)
        assert_close(result[0], out, "bfloat16", "out")
        assert_close(result[1], lse, "bfloat16 weights", "lse")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tree_mask": np.zeros(3, np.uint32)}, r"expected tree_mask \[num_tokens\]"),
        ({"tree_mask": np.zeros(90, np.int32)}, "expected tree_mask of dtype uint32, got int32"),
        ({"causal": False}, "expected causal=True with tree_mask"),
        ({"first": (1, [1, 3, 3, 9, 17])}, "0x3 for token 2 of sequence 1"),
        ({"first": (1, [1, 3, 0, 9, 17])}, "0x0 for token 2 of sequence 1"),
        ({"first": (1, [1, 7, 5, 9, 17])}, "0x7 for token 1 of sequence 1"),
        ({"first": (45, [1])}, "expected at most 32 new tokens of a sequence with a tree, got 35 of 4"),
    ],
)
def test_what_is_no_tree_is_refused(change: dict[str, Any], message: str) -> None:
    case = make_case(0, LONG, LONG_ROWS)
    trees = np.zeros(90, np.uint32)
    first, own = change.pop("first", (0, []))
    trees[first : first + len(own)] = own
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(*case.arrays, **{"sm_scale": 1.0, "tree_mask": trees, **change})


@pytest.mark.parametrize("backend", ["gpu"])
def test_kernels_without_trees_say_so(backend: str) -> None:
    shape = mla_cases.Shape()
    case = mla_cases.make_case(0, shape, [(1, 5)], Options())
    trees = np.zeros(shape.num_tokens, np.uint32)
    with pytest.raises(NotImplementedError, match="the kernel has no tree_mask"):
        mla_paged_attention(*case.arrays, sm_scale=1.0, tree_mask=trees, backend=backend)
