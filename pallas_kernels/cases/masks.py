"""Random options of attention: masks of windows, chunks and sink tokens, sinks, ranks of context parallelism."""

from __future__ import annotations

import numpy as np

from pallas_kernels.cases.case import Sizes
from pallas_kernels.cases.numbers import one_of

SINKS = (2.0, -np.inf, 50.0, -3.0, np.inf, 3e38, -1e30, 1e4)


def random_mask(rng: np.random.Generator, page_size: int) -> Sizes:
    """Fields of the mask rule: windows and chunks of pages and their neighbours, sink tokens."""
    near = page_size + int(rng.integers(-1, 2))
    window = max(1, one_of(rng, [1, 2, 8, near, near + 1, 37]))
    chunk = max(8, one_of(rng, [8, near, 24, 100]))
    sink_tokens = max(1, one_of(rng, [1, page_size, near + 1]))
    levels: list[Sizes] = [
        {},
        {},
        {"window": window},
        {"window": window, "sink_tokens": sink_tokens},
        {"chunk": chunk},
        {"chunk": chunk, "window": window, "sink_tokens": 1},
        {"causal": 0},
        {"causal": 0, "window": window},
    ]
    return dict(one_of(rng, levels))


def random_share(rng: np.random.Generator, backend: str) -> tuple[int, int]:
    """(rank, ranks) of context parallelism: several in one draw of four."""
    if backend == "gpu" or rng.random() < 0.75:
        return 0, 1
    size = one_of(rng, [2, 4, 8] if backend == "tpu" else [2, 3, 5, 8])
    return int(rng.integers(size)), size
