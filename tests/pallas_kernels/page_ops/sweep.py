"""Sweep of the work on whole pages on TPU: every pair of page shapes, dtypes and counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np

from tests.pallas_kernels.cases import as_bytes, random_values
from tests.pallas_kernels.on_tpu import compile_on_tpu
from tests.pallas_kernels.page_ops.test_page_ops import all_four, expected
from tests.pallas_kernels.sweeps import choices, naming

FACTORS: dict[str, tuple[Any, ...]] = {
    "page_shape": ((16, 2, 2, 128), (4, 3, 1, 128), (8, 128), (3, 7), (4, 2, 256)),
    "dtype": ("bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2"),
    "count": (1, 8, 33),
    "num_pages": (2, 13, 40),
}


def random_ids(rng: np.random.Generator, num_pages: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(sources, targets that are none of them): in order or not, some skipped, the null page on both sides."""
    order = np.arange(1, num_pages) if rng.integers(2) else rng.permutation(np.arange(1, num_pages))
    half = order.size // 2
    targets = np.append(order[half : half + count], np.full(max(0, count - (order.size - half)), -1))
    targets[rng.random(count) < 0.2] = -1
    targets[rng.random(count) < 0.1] = 0
    few = order[:half]
    sources = rng.choice(few, count) if few.size and rng.integers(2) else np.resize(few, count) if few.size else None
    sources = np.zeros(count) if sources is None else sources
    sources[rng.random(count) < 0.1] = rng.integers(-1, 1)
    return sources.astype(np.int32), targets.astype(np.int32)


def tpu(seed: int) -> Iterator[None]:
    """Copied, zeroed, gathered and scattered bit for bit as a page at a time in numpy; three lists of ids a choice."""
    for number, choice in choices(FACTORS, seed):
        rng = np.random.default_rng(number)
        run = None
        for step in range(3):
            pages = random_values(rng, (choice["num_pages"], *choice["page_shape"]), choice["dtype"])
            pages[0] = np.zeros((), pages.dtype)
            ids = random_ids(rng, choice["num_pages"], choice["count"])
            values = random_values(rng, (choice["count"], *choice["page_shape"]), choice["dtype"])
            arguments = [jnp.asarray(array) for array in (pages, *ids, values)]
            with naming(choice, step):
                run = run or compile_on_tpu(all_four("tpu"), *arguments)
                want = expected(pages, *ids, values)
                chex.assert_trees_all_equal(as_bytes(run(*arguments)), as_bytes(want), strict=True)
            yield


SWEEPS = {"tpu": tpu}
