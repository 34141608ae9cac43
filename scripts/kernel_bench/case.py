"""What one kernel benchmark is: arguments, a call, and the bytes and operations that nothing can do without.

Flow:    ops.<op>.cases(Sizes) -> list[BenchCase] -> driver -> rows of the table
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layouts import PageLayout

BLOCK_ELEMENTS = 1 << 20  # random numbers drawn on the host; a larger array repeats them


@dataclass(frozen=True)
class Sizes:
    """What the command line says of every case."""

    platform: str  # "tpu" or "gpu": whose page layout
    page: int = 128  # tokens
    dtype: str = "bfloat16"  # of the pages
    shards: int = 1  # tensor parallelism; one shard is measured
    batch: int = 0  # 0: by the case; as is the context
    context: int = 0
    small: bool = False  # a few tokens and heads, for a run on CPU

    @property
    def q_dtype(self) -> str:
        """Of everything that is not a page."""
        return "float32" if self.dtype == "float32" else "bfloat16"


class Work(NamedTuple):
    """The least that a call does: each byte of its inputs read once and of its outputs written once, layout padding
    apart; multiplications and additions of its sums."""

    num_bytes: int
    flops: int


class Arguments(NamedTuple):
    """Of one call. `pages` are the page arrays, which an op that writes gets donated."""

    pages: tuple[jax.Array, ...]
    rest: Any


@dataclass(frozen=True)
class BenchCase:
    """One op at one size. `call(backend, pages, rest)` gives (outputs, page arrays written or ())."""

    op: str
    kind: str  # decode, prefill...
    shape: str  # of the op's shapes.py
    size: str  # batch x context, in words
    sizes: Sizes
    work: Work
    arguments: Callable[[int], Arguments]  # of a seed
    call: Callable[[str, tuple[jax.Array, ...], Any], tuple[Any, tuple[jax.Array, ...]]]
    small: Callable[[], BenchCase]  # the same with few tokens and heads
    writes: bool = False
    setting: Any = None  # what rivals of this op need to know
    has_tokens_in_pages: bool = True  # else the page size is nothing to it
    same: Any = None  # cases of shapes that have this in common are the same but for their name

    @property
    def name(self) -> str:
        """Unlike that of any other case."""
        return f"{self.op}/{self.kind}/{self.shape}/{self.size}/page {self.sizes.page}/{self.sizes.dtype}"

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal of cases that measure the same."""
        sizes = self.sizes if self.has_tokens_in_pages else replace(self.sizes, page=0)
        return self.op, self.kind, self.size, sizes, self.shape if self.same is None else self.same


def itemsize(dtype: str) -> int:
    """Bytes of a number."""
    return jnp.dtype(dtype).itemsize


def random_pages(rng: np.random.Generator, layout: PageLayout, num_pages: int) -> tuple[jax.Array, ...]:
    """The page arrays of a layout; the null page is zero."""
    arrays = [random_array(rng, array.shape(num_pages), array.dtype) for array in layout.arrays]
    return tuple(array.at[0].set(0) for array in arrays)


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Normal numbers (int8: times 40) on the default device; the rows of a large array repeat."""
    row = int(np.prod(shape[1:], dtype=np.int64))
    rows = max(1, min(shape[0], BLOCK_ELEMENTS // max(1, row)))
    values = rng.standard_normal((rows, *shape[1:]), dtype=np.float32)
    if dtype == "int8":
        values = np.clip(np.rint(40 * values), -127, 127)
    return repeated(jnp.asarray(values).astype(dtype), shape[0])


def repeated(block: jax.Array, count: int) -> jax.Array:
    """`count` rows: those of `block` over and over."""
    rows = block.shape[0]
    return block if rows == count else block[jnp.arange(count) % rows]
