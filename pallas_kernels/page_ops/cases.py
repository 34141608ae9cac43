"""Cases of page_ops: pages of a pool copied, set to zero, read out and put back, at the shapes of models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases.case import Arguments, Results, Sizes, Step, Work, itemsize
from pallas_kernels.cases.compare import assert_same
from pallas_kernels.cases.kv_case import KVCase
from pallas_kernels.cases.numbers import DTYPES, one_of, random_array, random_values
from pallas_kernels.cases.pages import pool_pages, random_pages, random_platform, whole_rows
from pallas_kernels.page_ops import copy_pages, gather_pages, oracle, scatter_pages, zero_pages
from pallas_kernels.ragged_paged_attention.shapes import SHAPES

MOVES = ("copy", "zero", "gather", "scatter")


@dataclass(frozen=True)
class MoveCase(KVCase):
    """One of the ops over the arrays of a layout, one after the other."""

    move: str = "copy"
    count: int = 64  # pages

    op = "page_ops"
    calls = ("gather_pages", "scatter_pages", "copy_pages", "zero_pages")
    shapes = SHAPES
    kinds = MOVES
    backends = ("reference", "tpu", "gpu")
    features = tuple(f"move={move} dtype=float8_e4m3fn" for move in MOVES)

    @classmethod
    def of_kind(cls, kind: str, step: Step) -> Sizes:
        """`batch` pages."""
        return {"move": kind} | ({"count": 3, "num_pages": 7} if step.small else {"count": step.batch or 64})

    @classmethod
    def to_compile(cls, shape: Any, num_shards: int) -> Iterator[tuple[str, Sizes]]:
        """Every op of every page that KVCase compiles."""
        for move in MOVES:
            for label, sizes in super().to_compile(shape, num_shards):
                yield f"{move} {label}", {"move": move} | sizes

    @classmethod
    def random(cls, rng: np.random.Generator, backend: str) -> MoveCase:
        """A case of any pages; some have part of a TPU's lanes, which XLA moves."""
        dtype, heads = one_of(rng, DTYPES), one_of(rng, [1, 2, 3])
        platform = random_platform(rng, "reference")
        return cls(
            platform=platform,
            kv_heads=heads,
            head_dim=one_of(rng, [3, 128, 256]),
            page=whole_rows(one_of(rng, [1, 4, 8, 16]), heads, dtype, platform),
            dtype=dtype,
            num_pages=one_of(rng, [2, 13, 40]),
            move=one_of(rng, MOVES),
            count=one_of(rng, [1, 8, 33]),
        )

    @property
    def writes(self) -> bool:
        """All but one write."""
        return self.move != "gather"

    @property
    def size(self) -> str:
        """Pages."""
        return f"{self.count} pages"

    @property
    def work(self) -> Work:
        """Each page read, but for `zero`, and written."""
        page_bytes = 2 * self.page * self.kv_heads * self.head_dim * itemsize(self.dtype)
        return Work((1 if self.move == "zero" else 2) * self.count * page_bytes, 0)

    def arguments(self, seed: int) -> Arguments:
        """rest: ids that are read, ids that are written, the values that `scatter` writes."""
        rng = np.random.default_rng(seed)
        num_pages = self.num_pages or pool_pages(self.layout, 2 * self.count)
        pages = random_pages(rng, self.layout, num_pages)
        sources, targets = (1 + rng.permutation(num_pages - 1)[: 2 * self.count]).reshape(2, self.count)
        arrays = self.layout.arrays if self.move == "scatter" else ()
        values = tuple(random_array(rng, array.shape(self.count), array.dtype) for array in arrays)
        return Arguments(pages, (jnp.asarray(sources, jnp.int32), jnp.asarray(targets, jnp.int32), values))

    def hard_arguments(self, rng: np.random.Generator) -> Arguments:
        """Ids in order or not, some skipped, the null page among them; whatever stands in it."""
        arrays = [(array.shape(self.num_pages), array.shape(self.count)) for array in self.layout.arrays]
        pages = tuple(jnp.asarray(random_values(rng, shape, self.dtype)) for shape, _ in arrays)
        values = tuple(jnp.asarray(random_values(rng, shape, self.dtype)) for _, shape in arrays)
        sources, targets = (jnp.asarray(ids) for ids in _hard_ids(rng, self.num_pages, self.count))
        return Arguments(pages, (sources, targets, values))

    def call(self, backend: str, pages: tuple[Any, ...], rest: Any) -> Results:
        """Gathered pages are outputs."""
        sources, targets, values = rest
        if self.move == "gather":
            return Results(tuple(gather_pages(array, sources, backend=backend) for array in pages), ())
        if self.move == "scatter":
            pairs = zip(pages, values, strict=True)
            return Results((), tuple(scatter_pages(array, targets, x, backend=backend) for array, x in pairs))
        if self.move == "copy":
            return Results((), tuple(copy_pages(array, sources, targets, backend=backend) for array in pages))
        return Results((), tuple(zero_pages(array, targets, backend=backend) for array in pages))

    def expected(self, arguments: Arguments) -> Results:
        """By the oracle."""
        pages = [np.asarray(array) for array in arguments.pages]
        sources, targets, values = arguments.rest
        sources, targets = np.asarray(sources), np.asarray(targets)
        if self.move == "gather":
            return Results(tuple(oracle.gathered(array, sources) for array in pages), ())
        if self.move == "scatter":
            pairs = zip(pages, map(np.asarray, values), strict=True)
            return Results((), tuple(oracle.scattered(array, targets, x) for array, x in pairs))
        if self.move == "copy":
            return Results((), tuple(oracle.copied(array, sources, targets) for array in pages))
        return Results((), tuple(oracle.zeroed(array, targets) for array in pages))

    def assert_right(self, found: Results, arguments: Arguments) -> None:
        """Bit for bit."""
        assert_same(found, self.expected(arguments))


def _hard_ids(rng: np.random.Generator, num_pages: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(sources, targets that are none of them): in order or not, some skipped, the null page on both sides."""
    order = np.arange(1, num_pages) if rng.integers(2) else rng.permutation(np.arange(1, num_pages))
    few, many = np.split(order, [order.size // 2])
    targets = np.append(many[:count], np.full(max(0, count - many.size), -1))
    targets[rng.random(count) < 0.2] = -1
    targets[rng.random(count) < 0.1] = 0
    sources = np.zeros(count, np.int64)
    if few.size:
        sources = rng.choice(few, count) if rng.integers(2) else np.resize(few, count)
    sources[rng.random(count) < 0.1] = rng.integers(-1, 1)
    return sources.astype(np.int32), targets.astype(np.int32)


CASES = (MoveCase,)
