"""What indexer_topk must pick for one query: a full sort of scores in float64."""

from __future__ import annotations

import numpy as np


def picked(q: np.ndarray, weights: np.ndarray, keys: np.ndarray, topk: int) -> list[int]:
    """Entries of the highest scores for q [Hi, Di], weights [Hi] and keys [E, Di]; of equal ones the first."""
    scores = [sum(w * max(float(x @ k), 0.0) for w, x in zip(weights, q, strict=True)) for k in keys]
    return sorted(range(len(keys)), key=lambda e: (-scores[e], e))[:topk]
