"""What compressor_update must pool: the entries of a whole sequence, a number at a time in float64."""

from __future__ import annotations

import numpy as np


def compressed(
    kv: np.ndarray,  # [n, coff * D] of one sequence
    scores: np.ndarray,  # [n, coff * D]
    bias: np.ndarray,  # [R, coff * D]
    overlap: bool,
) -> np.ndarray:
    """float64[n // R, D], the entries of a whole sequence."""
    ratio, width = bias.shape
    dim = width // 2 if overlap else width
    entries = np.zeros((len(kv) // ratio, dim))
    for e in range(len(entries)):
        for d in range(dim):
            values, logits = [], []
            for token in range((e - overlap) * ratio, (e + 1) * ratio):
                if token < 0:
                    continue
                column = d + dim if overlap and token // ratio == e else d
                values.append(float(kv[token, column]))
                logits.append(float(scores[token, column]) + float(bias[token % ratio, column]))
            share = np.exp(np.array(logits) - max(logits))
            entries[e, d] = share @ np.array(values) / share.sum()
    return entries
