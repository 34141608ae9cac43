"""Random inputs of Mamba's ops, and the recurrences token by token in numpy float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import chex
import numpy as np

from tests.pallas_kernels.cases import assert_close, random_values
from tests.pallas_kernels.state_cases import Step, random_states, random_step

Arrays = dict[str, np.ndarray]


def conv_oracle(
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
    return np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0)


def mamba1_oracle(
    arrays: dict[str, np.ndarray], limit: tuple[float, float], step: Step
) -> tuple[np.ndarray, np.ndarray]:
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


def mamba2_oracle(
    arrays: dict[str, np.ndarray], limit: tuple[float, float], step: Step
) -> tuple[np.ndarray, np.ndarray]:
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


def scan_arrays(
    rng: np.random.Generator, num_tokens: int, heads: int, head_dim: int | None, state_dim: int, groups: int, dtype: str
) -> Arrays:
    """Arguments of `selective_scan` but states and step; `head_dim` None for Mamba 1."""
    of_group = (num_tokens, state_dim) if head_dim is None else (num_tokens, groups, state_dim)
    a = (heads, state_dim) if head_dim is None else (heads,)
    return {
        "x": random_values(rng, (num_tokens, heads) if head_dim is None else (num_tokens, heads, head_dim), dtype),
        "dt": random_values(rng, (num_tokens, heads), dtype),
        "a": -np.exp(rng.standard_normal(a)).astype(np.float32),
        "b": random_values(rng, of_group, dtype),
        "c": random_values(rng, of_group, dtype),
        "d": random_values(rng, (heads,), "float32"),
        "dt_bias": random_values(rng, (heads,), "float32"),
    }


def assert_states(got: np.ndarray, expected: np.ndarray, before: np.ndarray, step: Step, tolerance: float) -> None:
    """Written pages are as close to `expected` as `tolerance` of its largest value; others keep every bit."""
    written = step.written
    others = np.setdiff1d(np.arange(len(got)), written)
    assert got[others].tobytes() == before[others].tobytes()
    scale = max(1.0, float(np.abs(expected[written]).max(initial=0.0)))
    limit = {"rtol": 0, "atol": tolerance * scale, "strict": True}
    chex.assert_trees_all_close(got[written].astype(np.float64), expected[written], **limit)
    assert got.dtype == before.dtype


# x, states, weight, bias, step
ConvInputs = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None, Step]


@dataclass(frozen=True)
class ConvSizes:
    """Static sizes of calls of causal_conv1d."""

    num_tokens: int
    num_rows: int
    num_pages: int
    channels: int
    num_kept: int = 1

    def make(
        self, rng: np.random.Generator, q_lens: Sequence[int], taps: int, dtype: str, has_bias: bool
    ) -> ConvInputs:
        """(x, states, weight, bias, step); NaN in padding tokens and in pages that nobody starts from."""
        step = random_step(rng, q_lens, self.num_rows, self.num_pages, self.num_kept)
        x = random_values(rng, (self.num_tokens, self.channels), dtype)
        x[step.query_start_loc[-1] :] = np.nan
        states = random_states(rng, step, (self.channels, taps - 1), self.num_pages, dtype)
        weight = random_values(rng, (self.channels, taps), "float32")
        return x, states, weight, random_values(rng, (self.channels,), "float32") if has_bias else None, step


def assert_conv(result: tuple[Any, Any], inputs: ConvInputs, dtype: str, activation: str | None) -> None:
    """(out, states) of causal_conv1d is right: padding is 0, pages that nobody writes keep their bytes."""
    out, after = result
    x, states, weight, bias, step = inputs
    expected, expected_after = conv_oracle(x, states, weight, bias, activation == "silu", step)
    assert_close(out, expected, dtype, "out")
    assert (out[step.query_start_loc[-1] :] == 0).all()
    assert_states(np.asarray(after), expected_after, states, step, 0.0)
