"""Sweep of latent attention on GPU: more levels of every feature than the tests that always run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pallas_kernels.cases.latents import LatentShape
from pallas_kernels.mla_paged_attention import kernel_gpu
from tests.pallas_kernels.mla_paged_attention import test_kernel_gpu
from tests.pallas_kernels.mla_paged_attention.mla_cases import Shape, make_case
from tests.pallas_kernels.oracle import Options
from tests.pallas_kernels.sweeps import two_steps

FACTORS: dict[str, tuple[Any, ...]] = {
    "mask": ({}, {"sliding_window": 37}, {"attention_chunk_size": 100}, {"causal": False, "num_sink_tokens": 3}),
    "dtype": ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"),
    "page_size": (8, 16, 64, 128),
    "latent_dim": (128, 256, 512),
    "heads": (1, 5, 16, 24),
    "soft_cap": (None, 1.5),
    "sinks": (False, True),
}


def gpu(number: int, choice: dict[str, Any]) -> Callable[[int], None]:
    """The check of a step, for half of the choices in the sizes that the kernel itself chooses."""
    rng = np.random.default_rng(number)
    page_size, dtype = choice["page_size"], choice["dtype"]
    shape = Shape(
        num_tokens=int(rng.integers(3, 40)),
        num_rows=4,
        num_columns=320 // page_size,
        num_q_heads=choice["heads"],
        rope_dim=64,
        q_dtype="bfloat16",
        latent=LatentShape(head_dim=choice["latent_dim"] + 64, page_size=page_size, dtype=dtype),
    )
    scale = float(rng.uniform(0.5, 2))
    options = Options(
        **choice["mask"],
        sm_scale=0.002 if dtype == "int8" else 0.1,
        soft_cap=choice["soft_cap"],
        sinks=rng.standard_normal(shape.num_q_heads) if choice["sinks"] else None,
        k_scale=scale,
        v_scale=scale,
    )
    tuning = kernel_gpu.Tuning(num_blocks=5) if number % 2 else test_kernel_gpu.SMALL
    run = test_kernel_gpu.compiled(shape, options, tuning)

    def check(seed: int) -> None:
        case = make_case(seed, shape, None, options)
        test_kernel_gpu.assert_right(run(*case.arrays), case, options)

    return check


SWEEPS = {"gpu": two_steps(FACTORS, gpu)}
