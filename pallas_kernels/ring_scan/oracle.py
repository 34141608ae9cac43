"""What ring_scan must give: head by head, an attention over held and new tokens in numpy float64."""

from __future__ import annotations

import numpy as np

from pallas_kernels.cases.rings import Arrays, RingStep

OF_TOKENS = ("x", "dt", "b", "c")
RING = ("xs", "dts", "bs")


def ring_scan(
    arrays: Arrays, step: RingStep, limit: tuple[float, float], most_new: int
) -> tuple[np.ndarray, Arrays]:  # fmt: skip
    """(out float64[T, H, P], pages by name with what the step writes)."""
    x, dt, b, c = (arrays[name].astype(np.float64) for name in OF_TOKENS)
    steps = np.clip(_softplus(dt + arrays["dt_bias"]), *limit)
    after = {name: arrays[name].astype(np.float64) for name in ("states", *RING)}
    out = np.zeros(x.shape)
    for row in range(step.num_rows):
        num_new, start = step.num_new(row, most_new), step.tokens(row).start
        if not step.does(row, most_new):
            continue
        new = slice(start, start + num_new)
        held = [arrays[name][step.state_read[row], : step.num_held[row]].astype(np.float64) for name in RING]
        for h in range(x.shape[1]):
            base = arrays["states"][step.state_read[row], h].astype(np.float64)
            g = h * b.shape[1] // x.shape[1]
            all_x, all_dt, all_b = _of_head(held, (x.shape[1:], b.shape[1:]), (h, g), (x[new], steps[new], b[new]))
            logs = np.cumsum(np.append(0.0, all_dt * arrays["a"][h]))  # before each token, and after the last
            if step.state_page(row):
                last = int(step.num_held[row])
                kept = np.exp(logs[last] - logs[1 : last + 1]) * all_dt[:last]
                state = np.exp(logs[last]) * base + (kept[:, None] * all_x[:last]).T @ all_b[:last]
                after["states"][step.state_page(row), h] = state
            for i, t in enumerate(range(new.start, new.stop)):
                last = int(step.num_held[row]) + i + 1
                kept = np.exp(logs[last] - logs[1 : last + 1]) * all_dt[:last] * (all_b[:last] @ c[t, g])
                out[t, h] = np.exp(logs[last]) * (base @ c[t, g]) + kept @ all_x[:last] + arrays["d"][h] * x[t, h]
        if step.ring_page(row, most_new):
            for name, numbers in zip(RING, (x, steps, b), strict=True):
                slots = after[name][step.ring_page(row, most_new)]
                first = step.first_slot(row)
                for i, t in enumerate(range(new.start, new.stop)):
                    slot = np.zeros(slots[0].size)
                    slot[: numbers[t].size] = numbers[t].ravel()
                    slots[first + i] = slot.reshape(slots[0].shape)
    return out, after


def _of_head(
    held: list[np.ndarray],  # [held, *slot] of each array of the ring
    shapes: tuple[tuple[int, ...], tuple[int, ...]],  # (heads, head_dim), (groups, state_dim)
    head_and_group: tuple[int, int],
    new: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [n, P], time steps [n] and b [n, N] of a head's held and new tokens."""
    (heads, head_dim), (groups, state_dim) = shapes
    h, g = head_and_group
    flat = [array.reshape(len(array), int(np.prod(array.shape[1:]))) for array in held]
    xs = flat[0][:, : heads * head_dim].reshape(-1, heads, head_dim)
    bs = flat[2][:, : groups * state_dim].reshape(-1, groups, state_dim)
    return (
        np.concatenate([xs[:, h], new[0][:, h]]),
        np.concatenate([flat[1][:, h], new[1][:, h]]),
        np.concatenate([bs[:, g], new[2][:, g]]),
    )


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0)
