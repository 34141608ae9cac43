"""Random trees of drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MOST_TOKENS = 32


def random_trees(rng: np.random.Generator, rows: Sequence[tuple[int, int]], num_tokens: int) -> np.ndarray:
    """uint32[num_tokens] for sequences of `rows` (query length, sequence length), some of them without a tree.

    Chains, stars, trees, forests, and sets that are no path; padding has bits too, which mean nothing.
    """
    tree_mask = rng.integers(0, 1 << 32, num_tokens, np.uint32)
    start = 0
    for q_len, _ in rows:
        kind = rng.choice(["none", "chain", "star", "tree", "forest", "any"])
        tree_mask[start : start + q_len] = 0
        if q_len <= MOST_TOKENS and kind != "none":
            own: list[int] = []
            for n in range(q_len):
                least = -1 if kind == "forest" else 0
                parent = {"chain": n - 1, "star": 0}.get(kind, int(rng.integers(least, n)) if n > least else -1)
                above = int(rng.integers(0, 1 << n)) if kind == "any" else own[parent] if n and parent >= 0 else 0
                own.append(above | 1 << n)
            tree_mask[start : start + q_len] = own
        start += q_len
    return tree_mask
