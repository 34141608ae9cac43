"""sparse_mla_attention: layers with a window alone, with picked entries and with all entries, at the model shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases.case import Arguments, Work, itemsize
from pallas_kernels.cases.entries import KINDS, Entries, entry_bytes, entry_pages, entry_rows, stored_in
from pallas_kernels.cases.numbers import random_array
from pallas_kernels.cases.steps import Rows, Step, words
from pallas_kernels.latent_entries import EntryFormat, LatentFp8
from pallas_kernels.mask import MaskRule
from pallas_kernels.sparse_mla_attention import plan, sparse_mla_attention
from pallas_kernels.sparse_mla_attention.shapes import SHAPES, SparseShape
from scripts.kernel_bench.case import BenchCase, Sizes
from scripts.kernel_bench.shards import splits, with_most_shards

OP = "sparse_mla_attention"
_SMALL_TOPK = 16


@dataclass(frozen=True)
class Setting:
    """A shard of a model's layer and a step. The ratio is 0 where the layer has its window alone."""

    shape: SparseShape
    ratio: int
    num_heads: int
    step: Step  # of the window's cache
    dtype: str

    @property
    def entries(self) -> Entries | None:
        """Of the compressed cache, where there is one."""
        return Entries(self.step.rows, self.ratio) if self.ratio else None

    @property
    def topk(self) -> int | None:
        """Entries that a query picks; None: all."""
        return self.shape.topk if self.ratio == self.shape.ratios[0] else None

    @property
    def fp8(self) -> EntryFormat:
        """The model's format."""
        return LatentFp8(self.shape.rope_dim)


def cases(sizes: Sizes) -> Iterator[BenchCase]:
    """Every shape that splits so, each kind of step and layer; long contexts where entries show them."""
    for shape in SHAPES:
        for kind in KINDS if splits(shape, sizes.shards) else ():
            for ratio in shape.ratios if kind == "decode-32k" else (0, *shape.ratios):
                yield case(kind, ratio, shape, sizes)


def case(kind: str, ratio: int, shape: SparseShape, sizes: Sizes) -> BenchCase:
    """One step of one layer of one shape."""
    rows: Rows = entry_rows(kind, sizes)
    step = Step(rows, MaskRule(sliding_window=shape.sliding_window), sizes.page)
    setting = Setting(shape, ratio, shape.per_shard(sizes.shards), step, sizes.dtype)
    small = replace(shape, topk=_SMALL_TOPK)
    return BenchCase(
        OP,
        f"{kind} ratio {ratio}" if ratio else f"{kind} window",
        shape.name,
        words(rows),
        sizes,
        work(setting, sizes),
        lambda seed: arguments(setting, sizes, seed),
        lambda backend, pages, rest: call(setting, backend, pages, rest),
        lambda: case(kind, ratio, small, with_most_shards(small, replace(sizes, small=True))),
        same=None if setting.topk else setting.num_heads,
    )


def work(setting: Setting, sizes: Sizes) -> Work:
    """Each latent that any query's window has and each entry that any picks, once, as key and value; picks read;
    queries and outputs."""
    dim, topk, entries = setting.shape.dim, setting.topk, setting.entries
    num_states, num_pairs = setting.step.tokens_seen, setting.step.pairs_seen
    if entries is not None:
        num_states, num_pairs = num_states + entries.num_picked(topk), num_pairs + entries.num_pairs(topk)
    num_bytes = num_states * entry_bytes(dim, sizes.dtype, setting.fp8)
    num_bytes += setting.step.num_tokens * (2 * setting.num_heads * dim * itemsize(sizes.q_dtype) + 4 * (topk or 0))
    return Work(num_bytes, 4 * num_pairs * setting.num_heads * dim)


def arguments(setting: Setting, sizes: Sizes, seed: int) -> Arguments:
    """pages: of the window, of the entries; rest: q, sinks, step, its schedule, tables of the entries, picks."""
    rng = np.random.default_rng(seed)
    shape, step, entries = setting.shape, setting.step, setting.entries
    pages = [entry_pages(rng, shape.dim, step.page, step.num_pages, sizes.dtype, sizes.platform, setting.fp8)]
    arrays, tables, picks = step.arrays(rng), None, None
    if entries is not None:
        pages.append(
            entry_pages(rng, shape.dim, entries.page, entries.step.num_pages, sizes.dtype, sizes.platform, setting.fp8)
        )
        tables = entries.step.arrays(rng)[0]
        picks = None if setting.topk is None else jnp.asarray(entries.picks(setting.topk))
    schedule = plan(*arrays, num_tokens=step.num_tokens, sliding_window=shape.sliding_window, page_size=step.page)
    q = random_array(rng, (step.num_tokens, setting.num_heads, shape.dim), sizes.q_dtype)
    sinks = random_array(rng, (setting.num_heads,), "float32")
    return Arguments(tuple(pages), (q, sinks, arrays, schedule, tables, picks))


def call(setting: Setting, backend: str, pages: Any, rest: Any) -> tuple[Any, tuple[()]]:
    """The op alone: no write of new latents; the schedule, which all layers of a kind share, is given."""
    q, sinks, step, schedule, tables, picks = rest
    compressed: dict[str, Any] = {}
    if setting.entries is not None:
        compressed = {
            "compressed_pages": pages[1:],
            "compressed_tables": tables,
            "compressed_page_size": setting.entries.page,
            "tokens_per_state": setting.ratio,
            "topk_indices": picks,
        }
    result = sparse_mla_attention(
        q,
        pages[:1],
        *step,
        sm_scale=setting.shape.sm_scale,
        sliding_window=setting.shape.sliding_window,
        sinks=sinks,
        schedule=schedule,
        entries=stored_in(setting.dtype, setting.fp8)[0],
        page_size=setting.step.page,
        backend=backend,
        **compressed,
    )
    return result.out, ()
