"""Cases of dense attention over pages: who sees what, on which rank, and what ops and their oracle are told of it."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases.masks import SINKS
from pallas_kernels.cases.steps import Step, StepCase
from pallas_kernels.key_share import KeyShare
from pallas_kernels.mask import MaskRule


@dataclass(frozen=True)
class MaskedCase(StepCase, ABC):
    """Queries under a mask rule over pages. Sizes of kernels are 0 by the shapes."""

    heads: int = 32
    page: int = 128
    dtype: str = "bfloat16"  # of the pages
    q_dtype: str = "bfloat16"
    window: int = 0  # 0: none, as of the next ones
    chunk: int = 0
    sink_tokens: int = 0
    own_sinks: int = 0  # sink tokens of the last sequence, of the others fewer; 0: all have `sink_tokens`
    causal: int = 1
    soft_cap: float = 0.0
    sinks: int = 0
    lse: int = 0
    ranks: int = 1  # of context parallelism; the longest sequence lies on all of them
    rank: int = 0
    shared_columns: int = 0  # of hard steps: in which all sequences name the same pages
    hbm_tables: int = 0  # of the kernel for TPU
    small_trips: int = 0  # of vectorised XLA and Triton: several trips and pieces in a small step

    @property
    def mask(self) -> MaskRule:
        """Who sees what."""
        own = self.own_sinks > 0
        return MaskRule(bool(self.causal), self.window or None, self.chunk or None, self.sink_tokens, own)

    def sinks_of(self, num_seqs: int) -> tuple[int, ...]:
        """Sink tokens of each sequence, where they have their own."""
        return tuple(self.own_sinks * (seq + 1) // num_seqs for seq in range(num_seqs))

    @property
    def step(self) -> Step:
        """Of `arguments`; a page of all ranks is a column."""
        return Step(self.step_rows, self.mask, self.page * self.ranks)

    @property
    def given_rank(self) -> Any:
        """int32[] the rank; None: there is only one."""
        return jnp.int32(self.rank) if self.ranks > 1 else None

    def share_of(self, rank: Any) -> KeyShare | None:
        """What a kernel is told of a rank."""
        return None if rank is None else KeyShare(rank, self.ranks)

    def hard_sinks(self, rng: np.random.Generator) -> dict[str, Any]:
        """By the op's name: huge and tiny ones, where there are any."""
        if not self.sinks:
            return {}
        return {"sinks": jnp.asarray(np.resize(rng.permutation(SINKS), self.heads), jnp.float32)}

    def op_options(self, rank: Any) -> dict[str, Any]:
        """What the ops take, by name."""
        share = {"context_rank": 0 if rank is None else rank, "context_size": self.ranks}
        return self._mask_options | share | {"return_lse": bool(self.lse)}

    def oracle_options(self, **arrays: np.ndarray) -> dict[str, Any]:
        """What the oracle of attention takes, by name; `arrays`: sinks and scales."""
        return self._mask_options | arrays | {"held_by": (self.rank, self.ranks) if self.ranks > 1 else None}

    @property
    def _mask_options(self) -> dict[str, Any]:
        return {
            "causal": self.mask.causal,
            "sliding_window": self.mask.sliding_window,
            "attention_chunk_size": self.mask.attention_chunk_size,
            "num_sink_tokens": self.sink_tokens,
            "soft_cap": self.soft_cap or None,
        }

    def sizes_of(self, tuning: Any) -> dict[str, int]:
        """Fields of a kernel's tuning that are set."""
        return {name: size for name in tuning._fields if (size := getattr(self, name))}

    def of_all_ranks(self, own: np.ndarray) -> np.ndarray:
        """Whole columns [pages, page * ranks, ...] out of a rank's pages, NaN where others have the tokens."""
        columns = np.full((own.shape[0], self.page * self.ranks, *own.shape[2:]), np.nan)
        columns[:, self.rank :: self.ranks] = own
        return columns
