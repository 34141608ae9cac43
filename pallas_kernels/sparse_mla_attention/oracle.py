"""What sparse_mla_attention must give: one query over the vectors that it sees, in numpy float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def attention(
    q: np.ndarray,  # [Hq, D], one token
    latents: Sequence[np.ndarray],  # [D] each, what it sees
    sm_scale: float,
    sinks: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """(out float64[Hq, D], lse float64[Hq]) of one query over vectors that are keys and values; of none 0 and -inf."""
    kv = np.array(latents, np.float64)
    out, lse = np.zeros(q.shape), np.full(q.shape[0], -np.inf)
    if not len(kv):
        return out, lse
    for h in range(q.shape[0]):
        logits = kv @ q[h].astype(np.float64) * sm_scale
        top = max(logits.max(), -np.inf if sinks is None else sinks[h])
        weights = np.exp(logits - top)
        total = weights.sum() + (0 if sinks is None else np.exp(sinks[h] - top))
        out[h], lse[h] = weights @ kv / total, top + np.log(total)
    return out, lse
