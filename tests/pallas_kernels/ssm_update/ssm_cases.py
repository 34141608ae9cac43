"""Random steps of recurrent layers, and the recurrences token by token in numpy float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import chex
import jax.numpy as jnp
import numpy as np

from tests.pallas_kernels.cases import assert_close, random_values

Arrays = dict[str, np.ndarray]


class Step(NamedTuple):
    """What describes the sequences of one call, as numpy, in the ops' order."""

    query_start_loc: np.ndarray
    distribution: np.ndarray
    state_read: np.ndarray
    state_write: np.ndarray
    has_initial_state: np.ndarray

    def tokens(self, row: int) -> slice:
        return slice(self.query_start_loc[row], self.query_start_loc[row + 1])

    @property
    def num_rows(self) -> int:
        return int(self.distribution[2])


def random_step(
    rng: np.random.Generator, q_lens: Sequence[int], num_rows: int, num_pages: int, num_decode: int | None = None
) -> Step:
    """Rows of `q_lens` new tokens and padding; pages in random order, in place for a third of the rows.

    A page may be the initial state of several rows that write elsewhere; rows without one name any page.
    """
    padding = num_rows - len(q_lens)
    pages = rng.permutation(np.arange(1, num_pages))
    write = pages[:num_rows]
    shared = pages[num_rows:]
    has_initial = (rng.random(num_rows) < 0.7) & (np.array([*q_lens, *[0] * padding]) > 0)
    read = np.where(rng.random(num_rows) < 0.34, write, rng.choice(shared, num_rows))
    read[~has_initial] = rng.integers(0, num_pages, int((~has_initial).sum()))
    write[len(q_lens) :] = 0
    starts = np.concatenate([[0], np.cumsum([*q_lens, *[0] * padding])])
    decode = int(np.cumprod([q <= 1 for q in q_lens]).sum()) if num_decode is None else num_decode
    ends = np.array([decode, decode, len(q_lens)])
    int32 = (x.astype(np.int32) for x in (starts, ends, read, write))
    return Step(*int32, has_initial)


def random_states(
    rng: np.random.Generator, step: Step, shape: tuple[int, ...], num_pages: int, dtype: str
) -> np.ndarray:
    """Random states in the pages that a row starts from, NaN in all others; page 0 is zero."""
    states = random_values(rng, (num_pages, *shape), dtype)
    rows = np.arange(step.num_rows)
    q_lens = np.diff(step.query_start_loc)[rows]
    named = np.zeros(num_pages, bool)
    named[step.state_read[rows][step.has_initial_state[rows] & (q_lens > 0)]] = True
    states[~named] = np.nan
    states[0] = 0
    return states


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
        after[step.state_write[row]] = inputs[len(inputs) - taps + 1 :].T
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
        for t in range(x.shape[0])[step.tokens(row)]:
            delta = np.clip(softplus(arrays["dt"][t].astype(np.float64) + arrays["dt_bias"]), *limit)
            h = np.exp(delta[:, None] * arrays["a"]) * h + delta[:, None] * np.outer(x[t], arrays["b"][t])
            out[t] = h @ arrays["c"][t] + arrays["d"] * x[t]
            after[step.state_write[row]] = h
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
            after[step.state_write[row], h] = np.exp(log_decay[-1]) * initial + (share[-1] * inflow.T) @ b
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
    rows = np.arange(step.num_rows)
    written = step.state_write[rows][np.diff(step.query_start_loc)[rows] > 0]
    others = np.setdiff1d(np.arange(len(got)), written)
    assert got[others].tobytes() == before[others].tobytes()
    scale = max(1.0, float(np.abs(expected[written]).max(initial=0.0)))
    limit = {"rtol": 0, "atol": tolerance * scale, "strict": True}
    chex.assert_trees_all_close(got[written].astype(np.float64), expected[written], **limit)
    assert got.dtype == before.dtype


def on_device(step: Step) -> tuple:
    return tuple(jnp.asarray(x) for x in step)


# x, states, weight, bias, step
ConvInputs = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None, Step]


@dataclass(frozen=True)
class ConvSizes:
    """Static sizes of calls of causal_conv1d."""

    num_tokens: int
    num_rows: int
    num_pages: int
    channels: int

    def make(
        self, rng: np.random.Generator, q_lens: Sequence[int], taps: int, dtype: str, has_bias: bool
    ) -> ConvInputs:
        """(x, states, weight, bias, step); NaN in padding tokens and in pages that nobody starts from."""
        step = random_step(rng, q_lens, self.num_rows, self.num_pages)
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
