"""compressor_update: states and entries of a decode step and of a prefill, for each compressor of the model shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pallas_kernels.cases.case import Arguments, Work, itemsize
from pallas_kernels.cases.numbers import random_array
from pallas_kernels.cases.pages import random_pages
from pallas_kernels.compressor_update import compressor_update
from pallas_kernels.layouts import latent_layout
from pallas_kernels.mask import MaskRule
from pallas_kernels.sparse_mla_attention.shapes import SHAPES, SparseShape
from scripts.kernel_bench.case import BenchCase, Sizes
from scripts.kernel_bench.step import Rows, Step, words

OP = "compressor_update"
_STATE_BYTES = 4  # of a number: states are float32


@dataclass(frozen=True)
class Compressor:
    """Of one kind of layer. Where an entry has few tokens it pools those of the entry before, too."""

    ratio: int  # tokens of an entry
    dim: int  # of an entry

    @property
    def overlap(self) -> bool:
        """Whether it does."""
        return self.ratio < 128

    @property
    def width(self) -> int:
        """Numbers of KV of a token, and of scores."""
        return self.dim * (1 + self.overlap)

    @property
    def page(self) -> int:
        """States of a page, as vLLM has them for DeepSeek V4."""
        return 4 if self.overlap else 8

    @property
    def mask(self) -> MaskRule:
        """Tokens whose states an entry at its last token pools."""
        return MaskRule(sliding_window=self.ratio * (1 + self.overlap))


def cases(sizes: Sizes) -> Iterator[BenchCase]:
    """The compressors of both ratios, and the indexer's; shards hold all states."""
    for shape in SHAPES:
        for kind in ("decode", "prefill"):
            for of, compressor in compressors(shape).items():
                yield case(kind, of, compressor, shape, sizes)


def compressors(shape: SparseShape) -> dict[str, Compressor]:
    """By name."""
    found = {f"ratio {ratio}": Compressor(ratio, shape.dim) for ratio in shape.ratios}
    return found | {"indexer": Compressor(shape.ratios[0], shape.index_dim)}


def case(kind: str, of: str, compressor: Compressor, shape: SparseShape, sizes: Sizes) -> BenchCase:
    """One step of one compressor."""
    rows = rows_of_tokens(kind, sizes)
    size = words(rows) if kind == "prefill" else f"{len(rows)}x, up to {rows[0][1]}"
    return BenchCase(
        OP,
        f"{kind} {of}",
        shape.name,
        size,
        sizes,
        work(rows, compressor, sizes),
        lambda seed: arguments(rows, compressor, sizes, seed),
        lambda backend, pages, rest: call(compressor, backend, pages, rest),
        lambda: case(kind, of, compressor, shape, replace(sizes, small=True)),
        writes=True,
        has_tokens_in_pages=False,  # pages of states are the model's
        same=compressor,
    )


def rows_of_tokens(kind: str, sizes: Sizes) -> Rows:
    """Decoding sequences are of lengths one after the other, so that one in `ratio` completes an entry."""
    if kind == "prefill":
        length = 135 if sizes.small else sizes.context or 8192
        return ((length, length),)
    longest, count = (256, 4) if sizes.small else (sizes.context or 4096, sizes.batch or 64)
    return tuple((1, max(1, longest - i)) for i in range(count))


def work(rows: Rows, compressor: Compressor, sizes: Sizes) -> Work:
    """KV and scores of new tokens read, their states and the completed entries written; of older tokens what those
    entries pool is read, each number once. An addition of each new score, three operations of each pooled number."""
    num_tokens, ratio = sum(q for q, _ in rows), compressor.ratio
    pooled = old = num_entries = 0
    for q_len, length in rows:
        computed = length - q_len
        for entry in range(computed // ratio, length // ratio):
            first, own = ratio * entry - ratio * compressor.overlap, ratio * entry
            num_entries += 1
            pooled += ratio * (entry + 1) - max(0, first)
            old += max(0, min(computed, own) - max(0, first)) + max(0, computed - own)
    new = num_tokens * compressor.width
    num_bytes = 2 * new * (itemsize(sizes.q_dtype) + _STATE_BYTES)
    num_bytes += (2 * old + num_entries) * compressor.dim * _STATE_BYTES
    return Work(num_bytes, new + 3 * pooled * compressor.dim)


def arguments(rows: Rows, compressor: Compressor, sizes: Sizes, seed: int) -> Arguments:
    """pages: the states; rest: KV, scores, step, slots, bias."""
    rng = np.random.default_rng(seed)
    step = Step(rows, compressor.mask, compressor.page)
    layout = latent_layout(
        head_dim=2 * compressor.width, page_size=compressor.page, dtype="float32", platform=sizes.platform
    )
    pages = random_pages(rng, layout, step.num_pages)
    arrays = step.arrays(rng)
    kv, scores = (random_array(rng, (step.num_tokens, compressor.width), sizes.q_dtype) for _ in range(2))
    bias = random_array(rng, (compressor.ratio, compressor.width), "float32")
    return Arguments(pages, (kv, scores, arrays, step.new_slots(arrays[0]), bias))


def call(compressor: Compressor, backend: str, pages: Any, rest: Any) -> tuple[Any, Any]:
    """Entries with their positions, and the states."""
    kv, scores, step, slots, bias = rest
    options = {"position_bias": bias, "overlap": compressor.overlap, "page_size": compressor.page}
    result = compressor_update(kv, scores, pages, *step, slots, backend=backend, **options)
    return (result.entries, result.positions), result.pages
