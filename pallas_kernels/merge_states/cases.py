"""Cases of merge_states: two and eight parts of a decode step, at the shapes of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases.case import Arguments, Case, Results, Sizes, Step, Work, itemsize
from pallas_kernels.cases.compare import assert_heads_close
from pallas_kernels.cases.numbers import one_of, random_array
from pallas_kernels.merge_states import merge_states, oracle
from pallas_kernels.ragged_paged_attention.shapes import SHAPES, AttentionShape

_LSE_BYTES = 4
_HARD_SINKS = (3.0, -np.inf, 90.0, -1e30, 0.0, 50.0, np.inf, 1e4, -1e4)


@dataclass(frozen=True)
class MergeCase(Case):
    """One call of merge_states."""

    heads: int = 32
    head_dim: int = 128
    parts: int = 2
    tokens: int = 512
    q_dtype: str = "bfloat16"
    sinks: int = 0

    op = "merge_states"
    shapes = SHAPES
    kinds = ("2 parts", "8 parts")
    compiled = ()  # XLA fuses it everywhere

    @classmethod
    def of_shape(cls, shape: AttentionShape, num_shards: int) -> Sizes:
        """Query heads of a shard."""
        return {"heads": shape.per_shard(num_shards)[0], "head_dim": shape.head_dim}

    @classmethod
    def of_kind(cls, kind: str, step: Step) -> Sizes:
        """`batch` tokens."""
        return {"parts": int(kind.split()[0]), "tokens": 5 if step.small else step.batch or 512}

    @classmethod
    def random(cls, rng: np.random.Generator, backend: str) -> MergeCase:
        """A case of any parts, with sinks and without."""
        parts, dtype = one_of(rng, [1, 2, 3, 7]), one_of(rng, ["float32", "bfloat16"])
        return cls(heads=3, head_dim=8, parts=parts, tokens=5, q_dtype=dtype, sinks=int(rng.integers(2)))

    @property
    def size(self) -> str:
        """Tokens."""
        return f"{self.tokens} tokens"

    @property
    def work(self) -> Work:
        """Outputs and LSEs of the parts read, those of the whole written; a product and an addition a number."""
        rows = self.tokens * self.heads
        num_bytes = (self.parts + 1) * rows * (self.head_dim * itemsize(self.q_dtype) + _LSE_BYTES)
        return Work(num_bytes, 2 * self.parts * rows * self.head_dim)

    def arguments(self, seed: int) -> Arguments:
        """rest: outputs, LSEs, sinks."""
        rng = np.random.default_rng(seed)
        rows = (self.parts, self.tokens, self.heads)
        sinks = random_array(rng, (self.heads,), "float32") if self.sinks else None
        outs = random_array(rng, (*rows, self.head_dim), self.q_dtype)
        return Arguments((), (outs, random_array(rng, rows, "float32"), sinks))

    def hard_arguments(self, rng: np.random.Generator) -> Arguments:
        """Parts far apart; NaN where a part saw nothing, in the first row all of them."""
        rows = (self.parts, self.tokens, self.heads)
        lses = (rng.standard_normal(rows) * 4 + 30 * rng.standard_normal((self.parts, 1, 1))).astype(np.float32)
        lses[rng.random(rows) < 0.3] = -np.inf
        lses[:, 0] = -np.inf
        outs = rng.standard_normal((*rows, self.head_dim))
        outs[lses == -np.inf] = np.nan
        sinks = jnp.asarray(rng.choice(_HARD_SINKS, self.heads), jnp.float32) if self.sinks else None
        return Arguments((), (jnp.asarray(outs, self.q_dtype), jnp.asarray(lses), sinks))

    def call(self, backend: str, pages: tuple[Any, ...], rest: Any) -> Results:
        """With the LSE of the whole."""
        outs, lses, sinks = rest
        result = merge_states(outs, lses, sinks=sinks, return_lse=True, backend=backend)
        return Results((result.out, result.lse), ())

    def expected(self, arguments: Arguments) -> Results:
        """By the oracle."""
        outs, lses, sinks = (None if x is None else np.asarray(x).astype(np.float64) for x in arguments.rest)
        assert outs is not None
        assert lses is not None
        return Results(oracle.merge_states(outs, lses, sinks), ())

    def assert_right(self, found: Results, arguments: Arguments) -> None:
        """Head by head: a huge sink of one would hide what is wrong in others."""
        assert_heads_close(found.outs, self.expected(arguments).outs)


CASES = (MergeCase,)
