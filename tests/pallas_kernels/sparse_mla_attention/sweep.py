"""Sweep of sparse latent attention on GPU: more levels of every feature than the tests that always run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pallas_kernels.cases.latents import LatentShape
from pallas_kernels.latent_entries import LatentFp8, Plain
from pallas_kernels.sparse_mla_attention import kernel_gpu
from tests.pallas_kernels.sparse_mla_attention import test_kernel_gpu
from tests.pallas_kernels.sparse_mla_attention.sparse_cases import Shape, make_case
from tests.pallas_kernels.sweeps import two_steps

FACTORS: dict[str, tuple[Any, ...]] = {
    "kind": ({}, {"ratio": 1}, {"ratio": 4}, {"ratio": 1, "topk": 100}, {"ratio": 4, "topk": 20}, {"ratio": 128}),
    "cache": ("bfloat16", "float16", "fp8"),
    "page_size": (3, 16, 64),
    "entry_page_size": (1, 2, 64),
    "dim": (128, 384, 512),
    "heads": (1, 5, 64, 72),
    "window": (1, 64, 100),
    "sinks": (False, True),
    "num_blocks": (1, 20, 132),
}


def gpu(number: int, choice: dict[str, Any]) -> Callable[[int], None]:
    """The check of a step; tokens are split into pieces where the thread blocks are more than the tiles."""
    rng = np.random.default_rng(number)
    is_fp8 = choice["cache"] == "fp8"
    entries = LatentFp8() if is_fp8 else Plain()
    shape = Shape(
        num_tokens=int(rng.integers(3, 12)),
        num_rows=4,
        num_columns=320 // choice["page_size"],
        num_q_heads=choice["heads"],
        dim=choice["dim"],
        q_dtype="bfloat16" if is_fp8 else choice["cache"],
        window=choice["window"],
        entries=entries,
        latent=LatentShape(entries.width(choice["dim"]), choice["page_size"], "int8" if is_fp8 else choice["cache"]),
        entry_page_size=choice["entry_page_size"],
        **choice["kind"],
    )
    sinks = rng.standard_normal(shape.num_q_heads) if choice["sinks"] else None
    run = test_kernel_gpu.compiled(shape, sinks, kernel_gpu.Tuning(choice["num_blocks"]))
    return lambda seed: test_kernel_gpu.assert_right(run, make_case(seed, shape), sinks)


SWEEPS = {"gpu": two_steps(FACTORS, gpu)}
