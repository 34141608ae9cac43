"""What ring_delta_rule must give: the recurrence token by token in numpy float64, held tokens first."""

from __future__ import annotations

import numpy as np

from pallas_kernels.cases.rings import Arrays, RingStep

INPUTS = ("q", "k", "v", "g", "beta")
PAGES = ("states", "keys", "deltas", "decays")


def ring_delta_rule(
    arrays: Arrays, step: RingStep, scale: float, use_qk_l2norm: bool, most_new: int
) -> tuple[np.ndarray, Arrays]:
    """(out float64[T, H, V], pages by name with what the step writes): a token, a sequence and a head after another."""
    q, k, v, g, beta = (arrays[name].astype(np.float64) for name in INPUTS)
    before = {name: arrays[name].astype(np.float64) for name in PAGES}
    after = {name: array.copy() for name, array in before.items()}
    num_heads, heads_per_key = v.shape[1], v.shape[1] // q.shape[1]
    out = np.zeros(v.shape)

    def normed(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt(x @ x + 1e-6) if use_qk_l2norm else x

    def added(state: np.ndarray, key: np.ndarray, delta: np.ndarray, decay: np.ndarray) -> np.ndarray:
        return np.exp(decay).reshape(-1, 1) * state + np.outer(key, delta)

    for row in range(step.num_rows):
        page, num_new, start = step.state_read[row], step.num_new(row, most_new), step.tokens(row).start
        for h in range(num_heads) if step.does(row, most_new) else ():
            key_head = h // heads_per_key
            state = before["states"][page, h]
            for j in range(step.num_held[row]):
                key = normed(before["keys"][page, j, key_head])
                state = added(state, key, before["deltas"][page, j, h], before["decays"][page, j, h])
            if step.state_page(row):
                after["states"][step.state_page(row), h] = state
            for i, t in enumerate(range(start, start + num_new)):
                query, key = normed(q[t, key_head]), normed(k[t, key_head])
                delta = beta[t, h] * (v[t, h] - key @ (np.exp(g[t, h]).reshape(-1, 1) * state))
                state = added(state, key, delta, g[t, h])
                out[t, h] = scale * (query @ state)
                if step.ring_page(row, most_new):
                    slot = (step.ring_page(row, most_new), step.first_slot(row) + i)
                    after["keys"][(*slot, key_head)] = k[t, key_head]
                    after["deltas"][(*slot, h)], after["decays"][(*slot, h)] = delta, g[t, h]
    return out, after
