"""What causal_conv1d and selective_scan must give: the recurrences token by token in numpy float64."""

from __future__ import annotations

import numpy as np

from pallas_kernels.cases.states import Step


def causal_conv1d(
    x: np.ndarray, states: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, silu: bool, step: Step
) -> tuple[np.ndarray, np.ndarray]:
    """(out float64[T, C], states) of `causal_conv1d`."""
    taps = weight.shape[1]
    out, after = np.zeros(x.shape), states.astype(np.float64)
    for row in range(step.num_rows):
        new = x[step.tokens(row)].astype(np.float64)
        if not len(new):
            continue
        old = np.zeros((taps - 1, x.shape[1]))
        if step.has_initial_state[row]:
            old = states[step.state_read[row]].astype(np.float64).T
        inputs = np.concatenate([old, new])
        for i in range(len(new)):
            y = (inputs[i : i + taps] * weight.T.astype(np.float64)).sum(axis=0) + (0 if bias is None else bias)
            out[step.query_start_loc[row] + i] = y / (1 + np.exp(-y)) if silu else y
        for place, page in step.writes(row).items():
            after[page] = inputs[place + 1 : place + taps].T
    return out, after


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + exp(x))."""
    return np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0)


def mamba1(arrays: dict[str, np.ndarray], limit: tuple[float, float], step: Step) -> tuple[np.ndarray, np.ndarray]:
    """(out, states): for each channel its own decays, as in the first paper's recurrence."""
    x, states = arrays["x"].astype(np.float64), arrays["states"]
    out, after = np.zeros(x.shape), states.astype(np.float64)
    for row in range(step.num_rows):
        h = (
            states[step.state_read[row]].astype(np.float64)
            if step.has_initial_state[row]
            else np.zeros(states.shape[1:])
        )
        writes = step.writes(row)
        for place, t in enumerate(range(x.shape[0])[step.tokens(row)]):
            delta = np.clip(softplus(arrays["dt"][t].astype(np.float64) + arrays["dt_bias"]), *limit)
            h = np.exp(delta[:, None] * arrays["a"]) * h + delta[:, None] * np.outer(x[t], arrays["b"][t])
            out[t] = h @ arrays["c"][t] + arrays["d"] * x[t]
            if place in writes:
                after[writes[place]] = h
    return out, after


def mamba2(arrays: dict[str, np.ndarray], limit: tuple[float, float], step: Step) -> tuple[np.ndarray, np.ndarray]:
    """(out, states): head by head, as a masked attention over the sequence, the second paper's dual form."""
    x, states = arrays["x"].astype(np.float64), arrays["states"]
    num_heads, num_groups = x.shape[1], arrays["b"].shape[1]
    out, after = np.zeros(x.shape), states.astype(np.float64)
    for row in range(step.num_rows):
        tokens = step.tokens(row)
        if tokens.start == tokens.stop:
            continue
        for h in range(num_heads):
            g = h // (num_heads // num_groups)
            delta = np.clip(softplus(arrays["dt"][tokens, h].astype(np.float64) + arrays["dt_bias"][h]), *limit)
            log_decay = np.cumsum(delta * arrays["a"][h])
            b, c = (arrays[name][tokens, g].astype(np.float64) for name in ("b", "c"))
            share = np.tril(np.exp(np.minimum(log_decay[:, None] - log_decay[None], 0)))
            inflow = delta[:, None] * x[tokens, h]
            initial = np.zeros(states.shape[2:])
            if step.has_initial_state[row]:
                initial = states[step.state_read[row], h].astype(np.float64)
            carried = np.exp(log_decay)[:, None] * (c @ initial.T)
            out[tokens, h] = (share * (c @ b.T)) @ inflow + carried + arrays["d"][h] * x[tokens, h]
            for place, page in step.writes(row).items():
                after[page, h] = np.exp(log_decay[place]) * initial + (share[place] * inflow.T) @ b
    return out, after
