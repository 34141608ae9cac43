"""Cases of gated_delta_rule: decode steps, drafts and prefills, at the shapes of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases.case import Arguments, Results, Sizes, Work, itemsize
from pallas_kernels.cases.numbers import one_of, random_array, random_values
from pallas_kernels.cases.states import Arrays, StateCase, Step, hard_arguments, hard_counts
from pallas_kernels.gated_delta_rule import gated_delta_rule, oracle
from pallas_kernels.gated_delta_rule.arguments import Inputs
from pallas_kernels.gated_delta_rule.oracle import INPUTS
from pallas_kernels.gated_delta_rule.shapes import SHAPES, DeltaShape, OfDeltaLayer

_GATE_BYTES = 4
# Of a number of the state and a token: decay; times k, summed; k times delta, added; times q, summed.
_FLOPS = 7


@dataclass(frozen=True)
class DeltaCase(OfDeltaLayer, StateCase):
    """One call of gated_delta_rule."""

    key_heads: int = 16
    heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    per_channel: int = 0  # a decay for every number of the key
    l2norm: int = 1
    scale: float = 0.0  # 0: by the key's numbers

    op = "gated_delta_rule"
    shapes = SHAPES
    backends = ("reference", "xla", "tpu", "gpu")
    features = (
        "tokens=64",
        "tokens=64 model=kimi-linear-48b-a3b",
        "tokens=256 kept=4",
        "state_dtype=bfloat16",
        "q_dtype=float32",
        "model=kimi-linear-48b-a3b q_dtype=float32 state_dtype=bfloat16",
    )

    @classmethod
    def of_shape(cls, shape: DeltaShape, num_shards: int) -> Sizes:
        """Heads of a shard."""
        return shape.sizes(num_shards)

    @classmethod
    def random(cls, rng: np.random.Generator, backend: str) -> DeltaCase:
        """A case of either kind of decays, any dtypes and options."""
        sizes = {
            "tpu": [(1, 2, 128, 128), (2, 2, 128, 128)],
            "gpu": [(1, 2, 16, 64), (2, 2, 16, 32), (1, 3, 32, 32), (1, 2, 256, 64), (1, 1, 48, 96)],
        }
        key_heads, heads, key_dim, value_dim = one_of(
            rng, sizes.get(backend, [(2, 4, 4, 3), (1, 3, 1, 1), (2, 2, 16, 16)])
        )
        dtypes = ["float32", "bfloat16"] if backend == "tpu" else ["float32", "bfloat16", "float16"]
        return cls(
            tokens=12 if backend == "gpu" else one_of(rng, [1, 9, 76]),
            seqs=5,
            kept=one_of(rng, [1, 1, 3]),
            num_pages=30,
            q_dtype=one_of(rng, dtypes),
            state_dtype=one_of(rng, dtypes),
            key_heads=key_heads,
            heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            per_channel=int(rng.integers(2)),
            l2norm=int(rng.integers(2)),
            scale=0.7,
            checkpoints=one_of(rng, [0, 2]),
        )

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of a page."""
        return self.heads, self.key_dim, self.value_dim

    @property
    def work(self) -> Work:
        """q, k, v, g and beta read, outputs written; each state written, and one read by each sequence that has it."""
        numbers = 2 * self.key_heads * self.key_dim + 2 * self.heads * self.value_dim
        gates = self.heads * (1 + (self.key_dim if self.per_channel else 1))
        state = self.heads * self.key_dim * self.value_dim
        num_bytes = self.tokens * (numbers * itemsize(self.q_dtype) + gates * _GATE_BYTES)
        num_bytes += self.num_moved * state * itemsize(self.state_dtype)
        return Work(num_bytes, _FLOPS * self.tokens * state)

    def arguments(self, seed: int) -> Arguments:
        """rest: inputs by name, step."""
        rng = np.random.default_rng(seed)
        states = random_array(rng, (self.pool_pages, *self.state_shape), self.state_dtype).at[0].set(0)
        dtypes = dict.fromkeys(("q", "k", "v"), self.q_dtype)
        shapes = self.input_shapes.items()
        inputs = {name: random_array(rng, shape, dtypes.get(name, "float32")) for name, shape in shapes}
        inputs |= {"g": -jnp.exp(inputs["g"]), "beta": jax.nn.sigmoid(inputs["beta"])}
        return Arguments((states,), (inputs, self.step_arrays(rng)))

    def inputs(self, rng: np.random.Generator) -> Arrays:
        """Some decays are so strong that their sums leave what float32's exponential can hold."""
        arrays = {name: random_values(rng, self.input_shapes[name], self.q_dtype) for name in ("q", "k", "v")}
        if not self.l2norm:
            arrays["k"] = (arrays["k"].astype(np.float32) * self.key_dim**-0.5).astype(arrays["k"].dtype)
        decay = -np.exp(2 * rng.standard_normal(self.input_shapes["g"]))
        return arrays | {
            "g": decay.astype(np.float32),
            "beta": rng.random(self.input_shapes["beta"]).astype(np.float32),
        }

    def step(self, rng: np.random.Generator, q_lens: Sequence[int]) -> tuple[Arrays, Step]:
        """A random step of sequences with so many new tokens."""
        return self.make(rng, q_lens, INPUTS)

    def hard_arguments(self, rng: np.random.Generator) -> Arguments:
        """Sequences that end beside the ends of chunks."""
        return hard_arguments(rng, *self.step(rng, hard_counts(rng, self.tokens, self.seqs, (4, 16, 64))))

    def call(self, backend: str, pages: tuple[Any, ...], rest: Any) -> Results:
        """Outputs and states."""
        inputs, step = rest
        options: dict[str, Any] = {"scale": self.scale or None, "use_qk_l2norm": bool(self.l2norm), "backend": backend}
        result = gated_delta_rule(*Inputs(**inputs), pages[0], *step, **options)
        return Results(result.out, (result.states,))

    def oracle(self, arrays: Arrays, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """(out, states)."""
        scale = self.scale or self.key_dim**-0.5
        return oracle.gated_delta_rule(arrays, step, scale, bool(self.l2norm))


CASES = (DeltaCase,)
