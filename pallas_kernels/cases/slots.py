"""Where new tokens go: single slots of random pages, whole pages one after the other, or whatever is hard."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases.case import Sizes, Step
from pallas_kernels.cases.numbers import one_of
from pallas_kernels.layouts import cdiv

KINDS = ("decode", "prefill")
_FEW_PAGES = 9  # of a small case


def of_kind(kind: str, step: Step) -> Sizes:
    """A decode step of `batch` sequences, a page each, or a prefill of `context` tokens."""
    if kind == "decode":
        sizes: Sizes = {"tokens": 3 if step.small else step.batch or 256, "scattered": 1}
    else:
        sizes = {"tokens": 24 if step.small else step.context or 8192, "scattered": 0}
    return sizes | ({"num_pages": max(_FEW_PAGES, 1 + sizes["tokens"])} if step.small else {})


def num_filled(num_tokens: int, page: int, *, scattered: bool) -> int:
    """Pages that a step writes into."""
    return num_tokens if scattered else cdiv(num_tokens, page)


def new_slots(
    rng: np.random.Generator, num_tokens: int, num_pages: int, page: int, *, scattered: bool
) -> jax.Array:  # fmt: skip
    """int32[num_tokens] distinct slots, none of the null page."""
    per_page = 1 if scattered else page
    order = 1 + rng.permutation(num_pages - 1)[: cdiv(num_tokens, per_page)]
    first = rng.integers(0, page, order.shape) if scattered else np.zeros(order.shape, np.int64)
    slots = (order * page + first)[:, None] + np.arange(per_page)
    return jnp.asarray(slots.ravel()[:num_tokens], jnp.int32)


def hard_slots(rng: np.random.Generator, count: int, num_slots: int) -> jax.Array:
    """int32[count] different slots, page 0's too, in runs or in any order, some skipped."""
    order = (
        rng.permutation(num_slots) if rng.integers(2) else np.roll(np.arange(num_slots), int(rng.integers(num_slots)))
    )
    slots = np.append(order[:count], np.full(max(0, count - num_slots), -1))
    slots[rng.random(count) < one_of(rng, [0.0, 0.1, 0.5, 1.0])] = -1
    return jnp.asarray(slots, jnp.int32)
