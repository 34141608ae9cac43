"""Compressed entries of a step's sequences: which its queries see and pick, where they lie, pages of random ones.

Flow:    rows of a step, tokens of an entry -> [Entries] -> tables, picks, counts;   format -> [entry_pages] -> pages

The dtype float8_e4m3fn stands for the model's own fp8 entries, in pages of bytes; any other for plain vectors in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import case
from pallas_kernels.cases.case import itemsize
from pallas_kernels.cases.numbers import BLOCK_ELEMENTS, repeated
from pallas_kernels.cases.steps import Rows, Step, rows_of
from pallas_kernels.latent_entries import EntryFormat, Plain
from pallas_kernels.layouts import PageLayout, cdiv, latent_layout
from pallas_kernels.mask import MaskRule
from pallas_kernels.packed_pages import pages_of_states

KINDS = ("decode", "decode-32k", "prefill", "mixed")
BLOCK_TOKENS = 256  # of a page of entries, as vLLM has them for DeepSeek V4
_SMALL_ROWS: dict[str, Rows] = {
    "decode": ((1, 300), (1, 1), (1, 261)),
    "decode-32k": ((1, 515), (1, 130)),
    "prefill": ((20, 270),),
    "mixed": ((1, 20), (1, 300), (9, 290)),
}


def entry_rows(kind: str, step: case.Step) -> Rows:
    """The sequences of a kind of step; small ones have entries of 128 tokens, too."""
    return _SMALL_ROWS[kind] if step.small else rows_of(kind, step.batch, step.context)


@dataclass(frozen=True)
class Entries:
    """One entry for every `ratio` tokens of a sequence. A query sees those whose tokens all stand at or before it."""

    rows: Rows
    ratio: int
    page_size: int = 0  # entries of a page; 0: by the ratio

    @property
    def page(self) -> int:
        """Entries of a page."""
        return self.page_size or BLOCK_TOKENS // self.ratio

    @property
    def num_seen(self) -> int:
        """Over the sequences: entries that any query sees, each once."""
        return sum(length // self.ratio for _, length in self.rows)

    def num_pairs(self, topk: int | None) -> int:
        """(query, entry) pairs if each query picks `topk` of those it sees; None: all."""
        return sum(int((n if topk is None else np.minimum(n, topk)).sum()) for n in self._seen_by_query())

    def num_picked(self, topk: int | None) -> int:
        """Over the sequences: entries that any query picks, each once."""
        return self.num_seen if topk is None else _num_picked(self, topk)

    def picks(self, topk: int) -> np.ndarray:
        """int32[T, topk]: of one random order of a sequence's entries the first that the query sees, -1 after the last.

        So neighbouring queries pick much the same, as those of an indexer do. The same at every call.
        """
        rng = np.random.default_rng(0)
        picked = np.full((sum(q for q, _ in self.rows), topk), -1, np.int32)
        token = 0
        for (_, length), seen in zip(self.rows, self._seen_by_query(), strict=True):
            order = rng.permutation(length // self.ratio)
            for n in seen:
                found = order[order < n][:topk]
                picked[token, : len(found)] = found
                token += 1
        return picked

    @property
    def step(self) -> Step:
        """Whose block tables and pages are those of the entries, begun ones too."""
        return Step(tuple((1, cdiv(length, self.ratio)) for _, length in self.rows), MaskRule(), self.page)

    def _seen_by_query(self) -> list[np.ndarray]:
        """How many entries each query sees, int64[q_len] of each sequence."""
        return [np.arange(length - q_len + 1, length + 1) // self.ratio for q_len, length in self.rows]


@functools.cache
def _num_picked(entries: Entries, topk: int) -> int:
    picks, total, token = entries.picks(topk), 0, 0
    for q_len, _ in entries.rows:
        named = np.unique(picks[token : token + q_len])
        total, token = total + int((named >= 0).sum()), token + q_len
    return total


def stored_in(dtype: str, fp8: EntryFormat) -> tuple[EntryFormat, str]:
    """(Format, dtype of the page array) of entries in `dtype`; `fp8` is the model's format of float8_e4m3fn."""
    return (fp8, "int8") if dtype == "float8_e4m3fn" else (Plain(), dtype)


def entry_bytes(dim: int, dtype: str, fp8: EntryFormat) -> int:
    """Bytes of one entry, padding lanes apart."""
    entries, stored = stored_in(dtype, fp8)
    return entries.width(dim) * itemsize(stored)


def entry_pages(
    rng: np.random.Generator,
    dim: int,
    page: int,
    num_pages: int,
    dtype: str,
    platform: str,
    fp8: EntryFormat,
    vectors: Callable[[np.ndarray], np.ndarray] = lambda normal: normal,
) -> jax.Array:
    """Pages of random vectors, made by `vectors` of normal numbers, in their format; the null page is zero."""
    entries, stored = stored_in(dtype, fp8)
    layout: PageLayout = latent_layout(head_dim=entries.width(dim), page_size=page, dtype=stored, platform=platform)
    (array,) = layout.arrays
    shape = array.shape(num_pages)
    room = page if len(shape) == 3 else shape[1] * shape[3]
    count = max(1, min(num_pages, BLOCK_ELEMENTS // (room * dim)))
    normal = vectors(rng.standard_normal((count, room, dim), dtype=np.float32))
    rows = entries.encode(jnp.asarray(normal)).astype(stored)
    if len(shape) == 5:
        _, _, pieces, packing, lanes = shape
        rows = jnp.pad(rows, [(0, 0), (0, 0), (0, pieces * lanes - rows.shape[-1])])
        rows = pages_of_states(rows, packing)
    return repeated(rows, num_pages).at[0].set(0)
