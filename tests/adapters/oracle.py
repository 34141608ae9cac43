"""Attention from the definition, in numpy float64: what a query of a sequence sees of its K and V."""

from __future__ import annotations

import numpy as np


def attend(
    q: np.ndarray,  # [n, Hq, D] the last n queries of a sequence
    k: np.ndarray,  # [tokens, Hkv, D] of the whole sequence
    v: np.ndarray,  # [tokens, Hkv, Dv]
    *,
    sm_scale: float,
    window: int | None = None,
) -> np.ndarray:  # [n, Hq, Dv]
    """Each query sees itself and the tokens before it, of a window the last `window`."""
    n, tokens = len(q), len(k)
    out = np.zeros((n, q.shape[1], v.shape[-1]))
    for i in range(n):
        place = tokens - n + i
        first = 0 if window is None else max(0, place - window + 1)
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // k.shape[1])
            scores = k[first : place + 1, kv_head].astype(np.float64) @ q[i, head] * sm_scale
            weights = np.exp(scores - scores.max())
            out[i, head] = weights / weights.sum() @ v[first : place + 1, kv_head]
    return out


def attend_pages(
    q: np.ndarray,  # [T, Hq, D]
    pages: tuple[np.ndarray, np.ndarray],  # (K, V) [pages, page_size, Hkv, D], with the step's own written
    page_ids: list[np.ndarray],  # of each sequence, as many as it has
    lengths: np.ndarray,  # [S] tokens of each sequence with the step's own
    starts: np.ndarray,  # [S + 1]
    num_seqs: int,
    *,
    sm_scale: float,
    window: int | None = None,
) -> np.ndarray:  # [starts[num_seqs], Hq, Dv]
    """`attend` sequence by sequence."""
    outputs = []
    for i in range(num_seqs):
        k, v = (array[page_ids[i]].reshape(-1, *array.shape[2:])[: lengths[i]] for array in pages)
        outputs.append(attend(q[starts[i] : starts[i + 1]], k, v, sm_scale=sm_scale, window=window))
    return np.concatenate(outputs)
