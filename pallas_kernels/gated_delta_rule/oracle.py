"""What gated_delta_rule must give: the recurrence token by token in numpy float64."""

from __future__ import annotations

import numpy as np

from pallas_kernels.cases.states import Step

INPUTS = ("q", "k", "v", "g", "beta")


def gated_delta_rule(
    arrays: dict[str, np.ndarray], step: Step, scale: float, use_qk_l2norm: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(out float64[T, H, V], states): the recurrence, a token, a head and a sequence after the other."""
    q, k, v, g, beta = (arrays[name].astype(np.float64) for name in INPUTS)
    states, heads_per_key = arrays["states"], v.shape[1] // q.shape[1]
    out, after = np.zeros(v.shape), states.astype(np.float64)
    for row in range(step.num_rows):
        tokens, writes = step.tokens(row), step.writes(row)
        for h in range(v.shape[1]):
            state = np.zeros(states.shape[2:])
            if step.has_initial_state[row]:
                state = states[step.state_read[row], h].astype(np.float64)
            for place, t in enumerate(range(tokens.start, tokens.stop)):
                query, key = q[t, h // heads_per_key], k[t, h // heads_per_key]
                if use_qk_l2norm:
                    query, key = (x / np.sqrt(x @ x + 1e-6) for x in (query, key))
                state = np.exp(g[t, h]).reshape(-1, 1) * state
                state = state + np.outer(key, beta[t, h] * (v[t, h] - key @ state))
                out[t, h] = scale * (query @ state)
                if place in writes:
                    after[writes[place], h] = state
    return out, after
