"""Sweeps of attention on TPU and GPU: more levels of every feature than the tests that always run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pallas_kernels.ragged_paged_attention import kernel_gpu
from tests.pallas_kernels.cases import make_case, random_rows
from tests.pallas_kernels.ragged_paged_attention import test_kernel_gpu, test_kernel_tpu
from tests.pallas_kernels.ragged_paged_attention.test_against_oracle import shape_and_options
from tests.pallas_kernels.sweeps import choices, naming, two_steps

TPU_FACTORS: dict[str, tuple[Any, ...]] = test_kernel_tpu.FACTORS | {
    "mask": (
        *test_kernel_tpu.FACTORS["mask"],
        {"sliding_window": 1},
        {"attention_chunk_size": 130, "sliding_window": 90, "num_sink_tokens": 1},
        {"causal": False, "sliding_window": 33},
    ),
    "sizes": tuple(
        {"page_size": page, "num_columns": columns, "num_tokens": tokens, "num_rows": rows}
        for page, columns, tokens, rows in (
            (8, 36, 40, 4),
            (16, 20, 24, 4),
            (32, 12, 1, 1),
            (64, 5, 70, 5),
            (128, 4, 9, 6),
            (256, 2, 5, 3),
        )
    ),
    "heads": ((4, 2), (2, 2), (5, 1), (9, 3), (16, 2)),
    "head_dim": (64, 80, 96, 128, 192, 256),
}
GPU_FACTORS: dict[str, tuple[Any, ...]] = {
    "mask": (
        {},
        {"sliding_window": 37},
        {"attention_chunk_size": 100},
        {"sliding_window": 65, "num_sink_tokens": 70},
        {"causal": False, "num_sink_tokens": 3},
    ),
    "cache": tuple({"kv_dtype": name} for name in ("bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")),
    "sizes": tuple(
        {"page_size": page, "num_columns": 320 // page, "num_tokens": tokens, "num_rows": 6}
        for page, tokens in ((8, 6), (16, 150), (32, 60), (64, 90), (128, 300))
    ),
    "heads": ((2, 1), (6, 2), (9, 1), (20, 1)),
    "head_dim": (64, 96, (128, 96), 256),
    "q_dtype": ("bfloat16",),
    "soft_cap": (None, 1.5),
    "sinks": (False, True),
    "scales": (None, "scalar", "per_head"),
}
LENGTHS_0_AND_1 = [(0, 0), (1, 1), (0, 7)]


def tpu(seed: int) -> Iterator[None]:
    """The empty step, lengths 0 and 1, and two random steps of every choice."""
    for number, choice in choices(TPU_FACTORS, seed):
        shape, options = shape_and_options(choice, number)
        block = max(128, shape.page_size)
        tuning = test_kernel_tpu.SMALL_BLOCKS._replace(
            decode_block=block, tile_block=block, max_unrolled=choice["max_unrolled"]
        )
        with naming(choice, "compilation"):
            run = test_kernel_tpu.compiled(shape, options, tuning, choice["tables_in_hbm"])
        rng = np.random.default_rng(number)
        short = LENGTHS_0_AND_1[: min(shape.num_rows, 3)] if shape.num_rows > 1 else [(1, 1)]
        for step, rows in enumerate(([], short, random_rows(rng, shape), random_rows(rng, shape))):
            with naming(choice, (step, rows)):
                case = make_case(10 * number + step, shape, rows, options)
                test_kernel_tpu.assert_right(run(*case.arrays), case, options)
            yield


def gpu(number: int, choice: dict[str, Any]) -> Callable[[int], None]:
    """The check of a step, for half of the choices in the sizes that the kernel itself chooses."""
    shape, options = shape_and_options(choice, number)
    tuning = kernel_gpu.Tuning(num_blocks=5) if number % 2 else test_kernel_gpu.SMALL
    run = test_kernel_gpu.compiled(shape, options, tuning)

    def check(seed: int) -> None:
        case = make_case(seed, shape, None, options)
        test_kernel_gpu.assert_right(run(*case.arrays), case, options)

    return check


SWEEPS = {"tpu": tpu, "gpu": two_steps(GPU_FACTORS, gpu)}
