"""Where a step's new tokens go: single slots of random pages (decode), or whole pages one after the other (prefill)."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layouts import cdiv
from scripts.kernel_bench.case import Sizes

_POOL_TOKENS = 1 << 16


@dataclass(frozen=True)
class Slots:
    """Tokens of a step over a pool of pages, the null page among them."""

    num_tokens: int
    num_pages: int
    page: int
    scattered: bool  # a token a page

    def array(self, rng: np.random.Generator) -> jax.Array:
        """int32[num_tokens] distinct slots."""
        per_page = 1 if self.scattered else self.page
        order = 1 + rng.permutation(self.num_pages - 1)[: cdiv(self.num_tokens, per_page)]
        first = rng.integers(0, self.page, order.shape) if self.scattered else np.zeros(order.shape, np.int64)
        slots = (order * self.page + first)[:, None] + np.arange(per_page)
        return jnp.asarray(slots.ravel()[: self.num_tokens], jnp.int32)


def slots_of(kind: str, sizes: Sizes) -> Slots:
    """A decode step of `batch` sequences, or a prefill of `context` tokens."""
    if kind == "decode":
        num_tokens = 3 if sizes.small else sizes.batch or 256
    else:
        num_tokens = 24 if sizes.small else sizes.context or 8192
    needed = num_tokens if kind == "decode" else cdiv(num_tokens, sizes.page)
    pool = 8 if sizes.small else _POOL_TOKENS // sizes.page
    return Slots(num_tokens, 1 + max(needed, pool), sizes.page, kind == "decode")
