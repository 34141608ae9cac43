"""Cases of indexer_topk: picks for decode, prefill and both mixed, at the shapes of models.

All numbers are whole and small, so that scores are exact in any order of summation and every implementation must pick
the same entries in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import case, entries, steps
from pallas_kernels.cases.case import Arguments, Results, Sizes, Work, itemsize
from pallas_kernels.cases.entries import Entries, entry_bytes, entry_pages, stored_in
from pallas_kernels.cases.latents import LatentShape, by_state, decoded, laid_out, random_tables, seen_slots
from pallas_kernels.cases.numbers import one_of, random_array
from pallas_kernels.cases.pages import random_platform
from pallas_kernels.cases.steps import Step, StepCase, hard_rows, hard_step
from pallas_kernels.indexer_topk import indexer_topk, oracle
from pallas_kernels.latent_entries import EntryFormat, IndexFp8, Plain
from pallas_kernels.layouts import cdiv
from pallas_kernels.mask import MaskRule
from pallas_kernels.sparse_mla_attention.shapes import SHAPES, SparseShape

_LARGEST = 14.0  # 448, the largest of e4m3, times a power of two: scales of keys are exact, too


@dataclass(frozen=True)
class IndexerCase(StepCase):
    """One call of indexer_topk. The dtype float8_e4m3fn stands for the model's own fp8 keys."""

    context: int = 131072
    heads: int = 64
    dim: int = 128
    topk: int = 512
    ratio: int = 4  # tokens of an entry
    entry_page: int = 0  # entries of a page; 0: by the ratio
    dtype: str = "float8_e4m3fn"  # of the keys
    q_dtype: str = "bfloat16"

    op = "indexer_topk"
    shapes = SHAPES
    kinds = entries.KINDS
    backends = ("reference", "xla", "tpu", "triton")
    compiled = ("tpu",)

    @classmethod
    def of_shape(cls, shape: SparseShape, num_shards: int) -> Sizes:
        """Every shard has all heads."""
        return {"heads": shape.num_index_heads, "dim": shape.index_dim, "topk": shape.topk, "ratio": shape.ratios[0]}

    @classmethod
    def of_kind(cls, kind: str, step: case.Step) -> Sizes:
        """The sizes of `entries`."""
        return steps.of_rows(entries.entry_rows(kind, step)) | ({"topk": 16, "pool": 0} if step.small else {})

    @classmethod
    def to_compile(cls, shape: SparseShape, num_shards: int) -> Iterator[tuple[str, Sizes]]:
        """Keys in fp8 and in bfloat16."""
        yield f"{shape.name} fp8", cls.of_shape(shape, num_shards)
        yield f"{shape.name} bfloat16", cls.of_shape(shape, num_shards) | {"dtype": "bfloat16"}

    @classmethod
    def random(cls, rng: np.random.Generator, backend: str) -> IndexerCase:
        """A case with more entries than a tile and fewer than asked for."""
        return cls(
            platform=random_platform(rng, backend),
            tokens=24,
            seqs=5,
            context=160,
            heads=3,
            dim=8,
            topk=one_of(rng, [1, 7, 20, 128, 140]),
            ratio=one_of(rng, [1, 4, 128]),
            entry_page=one_of(rng, [1, 2, 4, 8, 64]),
            dtype=one_of(rng, ["float8_e4m3fn", "bfloat16", "float32"]),
            q_dtype=one_of(rng, ["bfloat16", "float32"]),
        )

    @property
    def format(self) -> EntryFormat:
        """The format of the keys."""
        return stored_in(self.dtype, IndexFp8())[0]

    @property
    def page(self) -> int:
        """Entries of a page."""
        return self.entry_page or entries.BLOCK_TOKENS // self.ratio

    @property
    def latent(self) -> LatentShape:
        """The shape of the pages."""
        stored = stored_in(self.dtype, IndexFp8())[1]
        return LatentShape(self.format.width(self.dim), self.page, stored, self.platform)

    @property
    def work(self) -> Work:
        """Each key that any query sees once; queries and weights read, picks written. A product of vectors, and its
        share added, for each head of a pair."""
        seen = Entries(self.step_rows, self.ratio)
        num_bytes = seen.num_seen * entry_bytes(self.dim, self.dtype, IndexFp8())
        num_bytes += self.tokens * (self.heads * (self.dim * itemsize(self.q_dtype) + 4) + 4 * self.topk)
        return Work(num_bytes, seen.num_pairs(None) * self.heads * (2 * self.dim + 2))

    def arguments(self, seed: int) -> Arguments:
        """pages: the keys; rest: q, weights, step."""
        rng = np.random.default_rng(seed)
        held = Entries(self.step_rows, self.ratio, self.page)
        num_pages = self.num_pages(self.latent.layout, held.step.num_pages - 1)
        sizes = (self.dim, self.page, num_pages, self.dtype, self.platform)
        pages = entry_pages(rng, *sizes, IndexFp8(), whole_keys)
        tables = held.step.arrays(rng)[0]
        step = Step(self.step_rows, MaskRule(), self.page * self.ratio).arrays(rng)[1:]
        q = jnp.rint(4 * random_array(rng, (self.tokens, self.heads, self.dim), "float32")).astype(self.q_dtype)
        weights = jnp.rint(4 * random_array(rng, (self.tokens, self.heads), "float32"))
        return Arguments((pages,), (q, weights, (tables, *step)))

    def hard_arguments(self, rng: np.random.Generator) -> Arguments:
        """The arguments of a step whose sequences end beside the ends of pages."""
        return self.step(rng, hard_rows(rng, self.tokens, self.seqs, self.page, self.context, False))

    def step(self, rng: np.random.Generator, rows: list[tuple[int, int]]) -> Arguments:
        """Keys whose scores are often equal; NaN in slots that no query sees."""
        lengths, starts, distribution = hard_step(rows, self.seqs)
        size, columns = self.page, cdiv(cdiv(self.context, self.ratio), self.page)
        named = [set(range(n // self.ratio)) if q else set() for q, n in zip(np.diff(starts), lengths, strict=True)]
        num_pages = 1 + self.seqs * columns
        tables = random_tables(rng, [{e // size for e in row} for row in named], columns, num_pages)
        keys = rng.integers(-2, 3, (num_pages, size, self.dim)).astype(np.float32)
        page = laid_out(self._stored(keys), self.latent, seen_slots(tables, named, num_pages, size))
        q = rng.integers(-2, 3, (self.tokens, self.heads, self.dim))
        weights = rng.integers(-1, 4, (self.tokens, self.heads))
        step = steps.on_device(tables, lengths, starts, distribution)
        return Arguments((jnp.asarray(page),), (jnp.asarray(q, self.q_dtype), jnp.asarray(weights, "float32"), step))

    def _stored(self, keys: np.ndarray) -> np.ndarray:
        """As pages hold them, exactly: in fp8 with scale 1."""
        if self.format == Plain():
            return keys.astype(jnp.dtype(self.dtype))
        scale = np.ones((*keys.shape[:-1], 1), np.float32).view(np.int8)
        return np.concatenate([keys.astype(jnp.dtype("float8_e4m3fn")).view(np.int8), scale], axis=-1)

    def call(self, backend: str, pages: tuple[Any, ...], rest: Any) -> Results:
        """The picks."""
        q, weights, step = rest
        options: dict[str, Any] = {"topk": self.topk, "tokens_per_state": self.ratio, "page_size": self.page}
        return Results(indexer_topk(q, weights, pages, *step, entries=self.format, backend=backend, **options), ())

    def expected(self, arguments: Arguments) -> Results:
        """By the oracle."""
        q, weights, step = arguments.rest
        q, weights = np.asarray(q).astype(np.float32), np.asarray(weights)
        tables, lengths, starts, _ = map(np.asarray, step)
        rows = by_state(np.asarray(arguments.pages[0]))[:, : self.page, : self.latent.head_dim]
        keys = decoded(rows, self.format, self.dim)
        picks = np.full((self.tokens, self.topk), -1, np.int32)
        for row, (start, end) in enumerate(pairwise(starts)):
            for t in range(start, end):
                visible = np.arange((lengths[row] - end + t + 1) // self.ratio)
                seen = keys[tables[row, visible // self.page], visible % self.page]
                best = oracle.picked(q[t], weights[t], seen, self.topk)
                picks[t, : len(best)] = best
        return Results(picks, ())


def whole_keys(normal: np.ndarray) -> np.ndarray:
    """The first number of each is the largest, which the format scales by."""
    whole = np.clip(np.rint(4 * normal), -_LARGEST, _LARGEST)
    whole[..., 0] = _LARGEST
    return whole


CASES = (IndexerCase,)
