"""DeepSeek V4's attention token by token in numpy float64: window and entries, indexer, compressor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def attention(
    q: np.ndarray,  # [Hq, D], one token
    latents: Sequence[np.ndarray],  # [D] each, what it sees
    sm_scale: float,
    sinks: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """(out float64[Hq, D], lse float64[Hq]) of one query over vectors that are keys and values."""
    kv = np.array(latents, np.float64)
    out, lse = np.zeros(q.shape), np.zeros(q.shape[0])
    for h in range(q.shape[0]):
        logits = kv @ q[h].astype(np.float64) * sm_scale
        top = max(logits.max(), -np.inf if sinks is None else sinks[h])
        weights = np.exp(logits - top)
        total = weights.sum() + (0 if sinks is None else np.exp(sinks[h] - top))
        out[h], lse[h] = weights @ kv / total, top + np.log(total)
    return out, lse


def picked(q: np.ndarray, weights: np.ndarray, keys: np.ndarray, topk: int) -> list[int]:
    """Entries of the highest scores for q [Hi, Di], weights [Hi] and keys [E, Di]; of equal ones the first."""
    scores = [sum(w * max(float(x @ k), 0.0) for w, x in zip(weights, q, strict=True)) for k in keys]
    return sorted(range(len(keys)), key=lambda e: (-scores[e], e))[:topk]


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
