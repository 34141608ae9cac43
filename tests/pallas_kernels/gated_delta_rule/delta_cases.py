"""Random steps of gated delta nets, and the recurrence token by token in numpy float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.pallas_kernels.cases import assert_close, random_values
from tests.pallas_kernels.state_cases import Step, random_states, random_step

Arrays = dict[str, np.ndarray]
INPUTS = ("q", "k", "v", "g", "beta")


def oracle(arrays: Arrays, step: Step, scale: float, use_qk_l2norm: bool) -> tuple[np.ndarray, np.ndarray]:
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


@dataclass(frozen=True)
class Shape:
    """Static shape of a call."""

    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 4
    value_dim: int = 3
    is_per_channel: bool = False
    num_tokens: int = 90
    num_kept: int = 1
    dtype: str = "float32"
    state_dtype: str = "float32"
    use_qk_l2norm: bool = True
    scale: float = 0.7
    num_rows: int = 5
    num_pages: int = 24

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return (self.value_heads, self.key_dim, self.value_dim)

    def arrays(self, rng: np.random.Generator) -> Arrays:
        """Inputs of all tokens. Some decays are so strong that their sums leave what float32's exponential can hold."""
        of_key, of_head = (self.num_tokens, self.key_heads, self.key_dim), (self.num_tokens, self.value_heads)
        decay = -np.exp(2 * rng.standard_normal((*of_head, self.key_dim) if self.is_per_channel else of_head))
        length = 1.0 if self.use_qk_l2norm else self.key_dim**-0.5
        return {
            "q": random_values(rng, of_key, self.dtype),
            "k": random_values(rng, of_key, self.dtype) * random_values(rng, (), self.dtype).dtype.type(length),
            "v": random_values(rng, (*of_head, self.value_dim), self.dtype),
            "g": decay.astype(np.float32),
            "beta": rng.random(of_head).astype(np.float32),
        }

    def make(self, rng: np.random.Generator, q_lens: Sequence[int]) -> tuple[Arrays, Step]:
        """A random step; NaN in padding tokens and in pages that nobody starts from; page 0 is zero."""
        step = random_step(rng, q_lens, self.num_rows, self.num_pages, self.num_kept)
        arrays = self.arrays(rng)
        for name in INPUTS:
            arrays[name][step.query_start_loc[-1] :] = np.nan
        states = random_states(rng, step, self.state_shape, self.num_pages, self.state_dtype)
        return arrays | {"states": states}, step

    def oracle(self, arrays: Arrays, step: Step) -> tuple[np.ndarray, np.ndarray]:
        return oracle(arrays, step, self.scale, self.use_qk_l2norm)

    def assert_right(self, result: tuple[Any, Any], arrays: Arrays, step: Step) -> None:
        """(out, states) is right: padding is 0, pages that nobody writes keep their bytes."""
        out, after = (np.asarray(x) for x in result)
        expected, expected_after = self.oracle(arrays, step)
        assert_close(out, expected, self.dtype, "out")
        assert (out[step.query_start_loc[-1] :] == 0).all()
        written = step.written
        others = np.setdiff1d(np.arange(self.num_pages), written)
        assert after[others].tobytes() == arrays["states"][others].tobytes()
        assert_close(after[written], expected_after[written], self.state_dtype, "states")
        assert (out.dtype, after.dtype) == (arrays["v"].dtype, arrays["states"].dtype)
