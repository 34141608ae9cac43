"""Trials of sparse_mla_attention.

Oracle: pallas_kernels/sparse_mla_attention/oracle.py, token by token in float64. Slots that no token names hold NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pallas_kernels.cases.latents import LatentShape
from pallas_kernels.cases.numbers import one_of
from pallas_kernels.cases.steps import hard_rows
from pallas_kernels.latent_entries import LatentFp8, Plain
from pallas_kernels.ragged_paged_attention.oracle import LARGEST_SINK
from pallas_kernels.sparse_mla_attention import kernel_gpu
from scripts.kernel_fuzz.trials import PLAIN, checked, compiled_on
from tests.pallas_kernels.cases import assert_right
from tests.pallas_kernels.sparse_mla_attention import test_kernel_gpu
from tests.pallas_kernels.sparse_mla_attention.sparse_cases import Case, Shape, make_case
from tests.pallas_kernels.sparse_mla_attention.test_kernel_tpu import arguments, op_of

_STEPS = 4
_SINKS = (2.0, -np.inf, 50.0, -3.0, np.inf, 3e38, -1e30)


def _random_shape(rng: np.random.Generator, platform: str) -> Shape:
    is_fp8 = bool(rng.random() < 0.4)
    dtype = "bfloat16" if platform == "gpu" else one_of(rng, ["bfloat16", "float32"])
    page_size = one_of(rng, [4, 8, 16, 64])
    dim = one_of(rng, [128, 256])
    entries = LatentFp8(64, 64) if is_fp8 else Plain()
    layout = "tpu" if platform == "tpu" or (platform in PLAIN and rng.random() < 0.5) else "cpu"
    kind = one_of(
        rng, [{}, {"ratio": 1}, {"ratio": 4}, {"ratio": 1, "topk": 40}, {"ratio": 4, "topk": 20}, {"ratio": 128}]
    )
    return Shape(
        num_tokens=one_of(rng, [1, 2, 9, 18]),
        num_rows=int(rng.integers(1, 6)),
        num_columns=-(-160 // page_size),
        num_q_heads=one_of(rng, [1, 3, 8, 20]),
        dim=dim,
        q_dtype="bfloat16" if platform == "gpu" else one_of(rng, ["bfloat16", "float32"]),
        window=one_of(rng, [1, 5, 30, page_size, page_size + 1]),
        entries=entries,
        latent=LatentShape(entries.width(dim), page_size, "int8" if is_fp8 else dtype, layout),
        entry_page_size=one_of(rng, [1, 2, 16, 64]),
        **kind,
    )


def sparse(rng: np.random.Generator, platform: str) -> Iterator[str]:
    """Steps of one shape of sparse_mla_attention."""
    shape = _random_shape(rng, platform)
    sinks = np.resize(rng.permutation(_SINKS), shape.num_q_heads) if rng.random() < 0.5 else None
    run = _compiled(rng, platform, shape, sinks)
    for _ in range(_STEPS):
        size = shape.latent.page_size
        rows = hard_rows(rng, shape.num_tokens, shape.num_rows, size, shape.num_columns * size, False)
        seed = int(rng.integers(1 << 30))

        def check(rows: Any = rows, seed: int = seed) -> None:
            case = make_case(seed, shape, rows)
            capped = None if sinks is None else np.minimum(sinks, LARGEST_SINK)
            assert_right(run(case), case.expected(capped), shape.q_dtype, "float32")

        yield checked((shape, sinks, rows), check)


def _compiled(rng: np.random.Generator, platform: str, shape: Shape, sinks: np.ndarray | None) -> Callable[[Case], Any]:
    if platform == "gpu":
        run = test_kernel_gpu.compiled(shape, sinks, kernel_gpu.Tuning(one_of(rng, [1, 20])))
        return lambda case: run(*test_kernel_gpu.arguments(case, sinks))

    op = op_of(shape, backend=platform)

    def call(*given: Any) -> Any:
        return op(*given)[:2]

    compiled = compiled_on(platform, rng, call, *arguments(make_case(0, shape, []), sinks))
    return lambda case: compiled(*arguments(case, sinks))
