"""Trials of ragged_paged_attention.

Oracle: that of the op, key by key in float64. Slots that nobody sees hold NaN, whole pages too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases.numbers import one_of
from pallas_kernels.cases.pages import whole_rows
from pallas_kernels.cases.steps import hard_rows
from pallas_kernels.key_share import KeyShare
from pallas_kernels.ragged_paged_attention import kernel_gpu, kernel_tpu, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.oracle import Options
from scripts.kernel_fuzz.trials import PLAIN, checked, compiled_on
from tests.pallas_kernels import cases
from tests.pallas_kernels.cases import assert_right, static_of
from tests.pallas_kernels.ragged_paged_attention.test_kernel_gpu import SMALL

_STEPS = 5  # of a compiled shape
_SINKS = (2.0, -np.inf, 50.0, -3.0, np.inf, 3e38, -1e30, 1e4)


def random_mask(rng: np.random.Generator, page_size: int) -> dict[str, Any]:
    """Options of the mask rule: windows and chunks of pages and their neighbours, sink tokens."""
    near = page_size + int(rng.integers(-1, 2))
    window = one_of(rng, [1, 2, 8, near, near + 1, 37])
    chunk = max(8, one_of(rng, [8, near, 24, 100]))
    sinks = one_of(rng, [1, page_size, near + 1])
    return one_of(
        rng,
        [
            {},
            {},
            {"sliding_window": max(1, window)},
            {"sliding_window": max(1, window), "num_sink_tokens": max(1, sinks)},
            {"attention_chunk_size": chunk},
            {"attention_chunk_size": chunk, "sliding_window": max(1, window), "num_sink_tokens": 1},
            {"causal": False},
            {"causal": False, "sliding_window": max(1, window)},
        ],
    )


def random_options(rng: np.random.Generator, page_size: int, heads: int, dtype: str, scale_shape: Any) -> Options:
    """All options; int8 pages hold values 64 times larger than others."""
    small = 1 / 64 if dtype == "int8" else 1.0
    k_scale, v_scale = (
        None if scale_shape is None else rng.uniform(0.3, 1.7, scale_shape).astype(np.float32) for _ in range(2)
    )
    return Options(
        **random_mask(rng, page_size),
        sm_scale=0.3 * small,
        soft_cap=one_of(rng, [None, None, 1.5, 30.0]),
        sinks=np.resize(rng.permutation(_SINKS), heads).astype(np.float32) if rng.random() < 0.4 else None,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def random_share(rng: np.random.Generator, platform: str) -> tuple[int, int] | None:
    """(rank, ranks) of context parallelism, in one trial of four."""
    if platform == "gpu" or rng.random() < 0.75:
        return None
    size = one_of(rng, [2, 4, 8] if platform == "tpu" else [2, 3, 5, 8])
    return int(rng.integers(size)), size


def ragged(rng: np.random.Generator, platform: str) -> Iterator[str]:
    """Steps of one shape of ragged_paged_attention."""
    is_plain = platform in PLAIN
    page_size = one_of(rng, [1, 3, 4, 16, 64, 128] if is_plain else [8, 16, 32, 64, 128, 256])
    dtypes = ["bfloat16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"]
    if platform != "gpu":
        dtypes.append("float32")
    if platform != "tpu":
        dtypes.append("float16")
    group, kv_heads = one_of(rng, [(1, 1), (1, 2), (2, 2), (3, 1), (4, 2), (5, 1), (8, 1), (9, 3), (16, 1), (2, 4)])
    kv_dtype = one_of(rng, dtypes)
    longest = one_of(rng, [130, 300, 600])
    q_dtype = one_of(rng, ["bfloat16", "float32"])
    if platform == "gpu":
        q_dtype = "float16" if kv_dtype == "float16" else "bfloat16"
    is_packed = platform == "tpu" or (platform in ("reference", "xla") and rng.random() < 0.5)
    layout = "tpu" if is_packed else "cpu"
    page_size = whole_rows(page_size, kv_heads, kv_dtype, layout)
    held_by = random_share(rng, platform)
    column = page_size * (held_by[1] if held_by else 1)  # tokens of all ranks
    shape = cases.Shape(
        num_tokens=one_of(rng, [1, 2, 7, 9, 17, 33, 40]),
        num_rows=int(rng.integers(1, 6)),
        num_columns=-(-longest // column),
        page_size=column,
        num_q_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=one_of(rng, [64, 96, 128, 256] if platform == "gpu" else [64, 80, 128, 192, 256]),
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        platform=layout,
    )
    options = random_options(rng, page_size, shape.num_q_heads, kv_dtype, one_of(rng, [None, (), (kv_heads,)]))
    options = _of_rank(options, held_by)
    run = _compiled_ragged(rng, platform, shape, options)
    exact = platform != "tpu" or "float32" in (q_dtype, kv_dtype)

    for _ in range(_STEPS):
        rows = hard_rows(rng, shape.num_tokens, shape.num_rows, page_size, shape.num_columns * column, True)
        seed, shared = int(rng.integers(1 << 30)), int(rng.integers(0, 3))

        def check(rows: Any = rows, seed: int = seed, shared: int = shared) -> None:
            case = cases.make_case(seed, shape, rows, options, shared_columns=shared)
            result = run(*(case.of_rank(*held_by) if held_by else case).arrays)
            assert_right(result, case.expected(options), q_dtype, "float32" if exact else "bfloat16 weights")

        yield checked((shape, options, rows, shared), check)


def _of_rank(options: Options, held_by: tuple[int, int] | None) -> Options:
    """Options of a rank's part, which has no sinks."""
    return Options(**{**vars(options), "held_by": held_by, "sinks": None}) if held_by else options


def _rank_options(held_by: tuple[int, int] | None) -> dict[str, Any]:
    """Those of an op."""
    rank, size = held_by or (0, 1)
    return {"context_rank": rank, "context_size": size}


def _compiled(
    rng: np.random.Generator,
    platform: str,
    call: Callable[..., Any],
    example: cases.Case,
    options: Options,
) -> Callable[..., Any]:
    """`call` of a rank's arrays."""
    arrays = (example.of_rank(*options.held_by) if options.held_by else example).arrays
    return compiled_on(platform, rng, call, *arrays)


def _compiled_ragged(
    rng: np.random.Generator, platform: str, shape: cases.Shape, options: Options
) -> Callable[..., Any]:
    v_scale = None if options.v_scale is None else jnp.asarray(options.v_scale, jnp.float32)
    static = static_of(options) | {"num_kv_heads": shape.num_kv_heads, "v_scale": v_scale}
    call: Callable[..., Any]
    if platform == "tpu":
        block = max(128, shape.page_size)
        sizes = kernel_tpu.Tuning(queries=8, decode_block=block, tile_block=block, max_unrolled=one_of(rng, [1, 8]))
        tuning = one_of(rng, [sizes, sizes, kernel_tpu.Tuning()])
        in_hbm = bool(rng.random() < 0.3)
        static["share"] = KeyShare(*options.held_by) if options.held_by else None
        call = partial(
            kernel_tpu.ragged_paged_attention, **static, return_lse=True, tuning=tuning, tables_in_hbm=in_hbm
        )
    elif platform == "gpu":
        tuning_gpu = one_of(rng, [kernel_gpu.Tuning(num_blocks=5), SMALL])
        call = partial(kernel_gpu.ragged_paged_attention, **static, return_lse=True, tuning=tuning_gpu)
    else:
        options_of_mask = asdict(static.pop("mask"))
        static |= options_of_mask | _rank_options(options.held_by)
        op = partial(ragged_paged_attention, **static, return_lse=True, backend=platform)
        call = lambda *arrays: op(*arrays)[:2]  # noqa: E731
    return _compiled(rng, platform, call, cases.make_case(0, shape, []), options)
