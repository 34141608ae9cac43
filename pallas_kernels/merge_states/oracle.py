"""What merge_states must give: a row at a time in float64."""

from __future__ import annotations

import numpy as np

LARGEST_SINK = float(np.finfo(np.float32).max)  # larger ones count as this


def merge_states(
    outs: np.ndarray,  # [num_parts, num_tokens, num_q_heads, head_dim]
    lses: np.ndarray,  # [num_parts, num_tokens, num_q_heads]
    sinks: np.ndarray | None,  # [num_q_heads]
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of attention over all parts; a row that no part saw a key of: 0 and -inf, with sinks too."""
    out, lse = np.zeros(outs.shape[1:]), np.full(lses.shape[1:], -np.inf)
    for t, h in np.ndindex(*lse.shape):
        seen = np.flatnonzero(lses[:, t, h] > -np.inf)
        if seen.size == 0:
            continue
        logits = lses[seen, t, h].astype(np.float64)
        extra = [] if sinks is None else [min(float(sinks[h]), LARGEST_SINK)]
        top = max([logits.max(), *extra])
        lse[t, h] = top + np.log(np.exp(logits - top).sum() + sum(np.exp(x - top) for x in extra))
        out[t, h] = np.exp(logits - lse[t, h]) @ outs[seen, t, h].astype(np.float64)
    return out, lse
