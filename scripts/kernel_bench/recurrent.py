"""Steps of recurrent layers: decoding sequences that continue their states, or one prompt that starts from nothing."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from scripts.kernel_bench.case import Sizes
from scripts.kernel_bench.step import Rows

KINDS = ("decode", "prefill")


@dataclass(frozen=True)
class StateStep:
    """New tokens of each sequence; each has one state."""

    rows: Rows
    has_states: bool  # from the steps before

    @classmethod
    def of(cls, kind: str, sizes: Sizes) -> StateStep:
        """A decode step of `batch` sequences, or a prefill of `context` tokens."""
        if kind == "decode":
            return cls(((1, 1),) * (3 if sizes.small else sizes.batch or 64), True)
        length = 20 if sizes.small else sizes.context or 8192
        return cls(((length, length),), False)

    @property
    def num_seqs(self) -> int:
        """States that are written."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """New ones."""
        return sum(q for q, _ in self.rows)

    @property
    def num_moved(self) -> int:
        """States that are read or written, a state that is both twice."""
        return self.num_seqs * (2 if self.has_states else 1)

    def arrays(self, rng: np.random.Generator) -> tuple[jax.Array, ...]:
        """(query_start_loc, distribution, state_read, state_write, has_initial_state): each state in its own page."""
        starts = np.cumsum([0, *(q for q, _ in self.rows)])
        num_decode = self.num_seqs if self.has_states else 0
        ids = 1 + rng.permutation(self.num_seqs)
        ints = (starts, (num_decode, num_decode, self.num_seqs), ids, ids)
        return (*(jnp.asarray(x, jnp.int32) for x in ints), jnp.full(self.num_seqs, self.has_states))
