"""Cases of sparse_mla_attention: layers with a window alone, with picked entries and with all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import case, entries, steps
from pallas_kernels.cases.case import Arguments, Results, Sizes, Work, itemsize
from pallas_kernels.cases.compare import assert_heads_close
from pallas_kernels.cases.entries import Entries, entry_bytes, entry_pages, stored_in
from pallas_kernels.cases.latents import LatentShape, by_state, decoded
from pallas_kernels.cases.masks import SINKS
from pallas_kernels.cases.numbers import one_of, random_array
from pallas_kernels.cases.pages import random_platform
from pallas_kernels.cases.steps import Step, StepCase, hard_rows
from pallas_kernels.latent_entries import EntryFormat, LatentFp8
from pallas_kernels.mask import MaskRule
from pallas_kernels.sparse_mla_attention import kernel_gpu, oracle, plan, sparse_mla_attention
from pallas_kernels.sparse_mla_attention.hard_steps import Shape, make_case
from pallas_kernels.sparse_mla_attention.shapes import SHAPES, SparseShape

_LARGEST_SINK = float(np.finfo(np.float32).max)  # larger ones count as this


@dataclass(frozen=True)
class SparseCase(StepCase):
    """One call of sparse_mla_attention, without the write of new latents.

    The dtype float8_e4m3fn stands for the model's own fp8 entries.
    """

    context: int = 131072
    heads: int = 64
    dim: int = 512
    rope_dim: int = 64
    topk: int = 512  # entries that a query picks; 0: all
    ratio: int = 4  # tokens of an entry; 0: the window alone
    window: int = 128  # 0: none; an indexer picks among all tokens
    page: int = 64  # states of the window's pages
    entry_page: int = 0  # entries of a page; 0: by the ratio
    dtype: str = "float8_e4m3fn"
    q_dtype: str = "bfloat16"
    sinks: int = 1
    lse: int = 0
    planned: int = 0  # the schedule, which all layers of a kind share, is given
    num_blocks: int = 0  # thread blocks of the kernel for GPU; 0: by the card

    op = "sparse_mla_attention"
    shapes = SHAPES
    kinds = tuple(
        f"{kind} {of}"
        for kind in entries.KINDS
        for of in (("ratio 4", "ratio 128") if kind == "decode-32k" else ("window", "ratio 4", "ratio 128"))
    )
    backends = ("reference", "xla", "tpu", "gpu")
    allowed_spills = {("", ""): 380}  # noqa: RUF012
    features = ("dtype=bfloat16", "dtype=bfloat16 ratio=0 topk=0", "tokens=64", "tokens=8192")

    @classmethod
    def of_shape(cls, shape: SparseShape, num_shards: int) -> Sizes:
        """Query heads of a shard; every shard has all entries."""
        sizes = {"dim": shape.dim, "rope_dim": shape.rope_dim, "topk": shape.topk, "window": shape.sliding_window}
        return {"heads": shape.per_shard(num_shards), **sizes}

    @classmethod
    def of_kind(cls, kind: str, step: case.Step) -> Sizes:
        """A step of `entries` in one kind of layer."""
        name, _, layer = kind.partition(" ")
        sizes = steps.of_rows(entries.entry_rows(name, step)) | layer_sizes(layer) | {"planned": 1}
        if step.small:
            sizes |= {"pool": 0} | ({"topk": 16} if layer == "ratio 4" else {})
        return sizes

    @classmethod
    def to_compile(cls, shape: SparseShape, num_shards: int) -> Iterator[tuple[str, Sizes]]:
        """Each kind of layer over fp8 entries, and over bfloat16 ones where an indexer picks them."""
        sizes = cls.of_shape(shape, num_shards)
        for layer in ("window", "ratio 4", "ratio 128"):
            yield f"{shape.name} {layer} fp8", sizes | layer_sizes(layer)
        yield f"{shape.name} ratio 4 bfloat16", sizes | layer_sizes("ratio 4") | {"dtype": "bfloat16"}

    @classmethod
    def random(cls, rng: np.random.Generator, backend: str) -> SparseCase:
        """Of any kind of layer, pages and entries."""
        is_gpu = backend == "gpu"
        page, dtypes = one_of(rng, [4, 8, 16, 64]), ["bfloat16"] if is_gpu else ["bfloat16", "float32"]
        ratio, topk = one_of(rng, [(0, 0), (1, 0), (4, 0), (1, 40), (4, 20), (128, 0)])
        return cls(
            platform=random_platform(rng, backend),
            tokens=one_of(rng, [1, 2, 9, 18]),
            seqs=int(rng.integers(1, 6)),
            context=160 // page * page,
            heads=one_of(rng, [1, 3, 8, 20]),
            dim=one_of(rng, [128, 256]),
            topk=topk,
            ratio=ratio,
            window=one_of(rng, [1, 5, 30, page, page + 1] + [0] * (bool(topk) and not is_gpu)),
            page=page,
            entry_page=one_of(rng, [1, 2, 16, 64]),
            dtype="float8_e4m3fn" if rng.random() < 0.4 else one_of(rng, dtypes),
            q_dtype="bfloat16" if is_gpu else one_of(rng, ["bfloat16", "float32"]),
            sinks=int(rng.integers(2)),
            lse=1,
            num_blocks=one_of(rng, [1, 20]) if is_gpu else 0,
        )

    @property
    def sm_scale(self) -> float:
        """Factor on the logits."""
        return self.dim**-0.5

    @property
    def fp8(self) -> EntryFormat:
        """The model's format."""
        return LatentFp8(self.rope_dim)

    @property
    def format(self) -> EntryFormat:
        """Of the states."""
        return stored_in(self.dtype, self.fp8)[0]

    @property
    def held(self) -> Entries | None:
        """The compressed cache of `arguments`, where there is one."""
        return Entries(self.step_rows, self.ratio, self.entry_page) if self.ratio else None

    @property
    def window_step(self) -> Step:
        """The step over the window's cache."""
        return Step(self.step_rows, MaskRule(sliding_window=self.window), self.page)

    def latent(self, page_size: int) -> LatentShape:
        """Of pages of so many states."""
        stored = stored_in(self.dtype, self.fp8)[1]
        return LatentShape(self.format.width(self.dim), page_size, stored, self.platform)

    @property
    def work(self) -> Work:
        """Each latent that any query's window has and each entry that any picks, once, as key and value; picks read;
        queries and outputs."""
        step, held, topk = self.window_step, self.held, self.topk or None
        num_states, num_pairs = step.tokens_seen, step.pairs_seen
        if held is not None:
            num_states, num_pairs = num_states + held.num_picked(topk), num_pairs + held.num_pairs(topk)
        num_bytes = num_states * entry_bytes(self.dim, self.dtype, self.fp8)
        num_bytes += step.num_tokens * (2 * self.heads * self.dim * itemsize(self.q_dtype) + 4 * self.topk)
        return Work(num_bytes, 4 * num_pairs * self.heads * self.dim)

    def arguments(self, seed: int) -> Arguments:
        """pages: of the window, of the entries; rest: q, sinks, step, its schedule, tables of the entries, picks."""
        rng = np.random.default_rng(seed)
        step, held = self.window_step, self.held
        pages, arrays, tables, picks = [self._pages(rng, step)], step.arrays(rng), None, None
        if held is not None:
            pages.append(self._pages(rng, held.step))
            tables = held.step.arrays(rng)[0]
            picks = jnp.asarray(held.picks(self.topk)) if self.topk else None
        schedule = None
        if self.planned:
            schedule = plan(*arrays, num_tokens=self.tokens, sliding_window=self.window, page_size=self.page)
        q = random_array(rng, (self.tokens, self.heads, self.dim), self.q_dtype)
        sinks = random_array(rng, (self.heads,), "float32") if self.sinks else None
        return Arguments(tuple(pages), (q, sinks, arrays, schedule, tables, picks))

    def _pages(self, rng: np.random.Generator, step: Step) -> jax.Array:
        """Of states of a step."""
        num_pages = self.num_pages(self.latent(step.page).layout, step.num_pages - 1)
        return entry_pages(rng, self.dim, step.page, num_pages, self.dtype, self.platform, self.fp8)

    def hard_arguments(self, rng: np.random.Generator) -> Arguments:
        """Sequences that end beside the ends of pages; holes and entries of the future among the picks."""
        rows = hard_rows(rng, self.tokens, self.seqs, self.page, self.context, False)
        shape = Shape(
            self.tokens,
            self.seqs,
            self.context // self.page,
            self.heads,
            self.dim,
            self.q_dtype,
            self.window,
            self.ratio or None,
            self.topk or None,
            self.format,
            self.latent(self.page),
            self.entry_page,
        )
        made = make_case(int(rng.integers(1 << 30)), shape, rows)
        sinks = jnp.asarray(np.resize(rng.permutation(SINKS), self.heads), jnp.float32) if self.sinks else None
        given: dict[str, Any] = jax.tree.map(jnp.asarray, made.compressed)
        pages = (jnp.asarray(made.page), *given.get("compressed_pages", ()))
        of_entries = (given.get("compressed_tables"), given.get("topk_indices"))
        return Arguments(pages, (jnp.asarray(made.q), sinks, steps.on_device(*made.step), None, *of_entries))

    def call(self, backend: str, pages: tuple[Any, ...], rest: Any) -> Results:
        """(out, LSE or None): the op, or the kernel for GPU in a size of its own."""
        q, sinks, step, schedule, tables, picks = rest
        entry_page = Entries((), self.ratio, self.entry_page).page if self.ratio else None
        options: dict[str, Any] = {"sm_scale": self.sm_scale, "entries": self.format, "page_size": self.page}
        if backend == "gpu" and self.num_blocks:
            planned = plan(*step, num_tokens=self.tokens, sliding_window=self.window, page_size=self.page)
            options |= {"tokens_per_state": self.ratio or 1, "entry_page_size": entry_page or self.entry_page}
            options |= {"tuning": kernel_gpu.Tuning(self.num_blocks)}
            arrays = (q, pages[:1], planned, pages[1:] or None, tables, picks, sinks)
            return Results(tuple(kernel_gpu.sparse_mla_attention(*arrays, **options)), ())
        if self.ratio:
            options |= {"compressed_pages": pages[1:], "compressed_tables": tables, "topk_indices": picks}
            options |= {"compressed_page_size": entry_page, "tokens_per_state": self.ratio}
        options |= {"sliding_window": self.window, "sinks": sinks, "schedule": schedule, "backend": backend}
        result = sparse_mla_attention(q, pages[:1], *step, return_lse=bool(self.lse), **options)
        return Results((result.out, result.lse), ())

    def expected(self, arguments: Arguments) -> Results:
        """By the oracle, a token at a time over the states that it sees."""
        q, sinks, step, _, entry_tables, picks = arguments.rest
        tables, lengths, starts, _ = map(np.asarray, step)
        sinks = None if sinks is None else np.minimum(np.asarray(sinks).astype(np.float64), _LARGEST_SINK)
        states = self._decoded(arguments.pages[0], self.page)
        out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
        for row, (start, end) in enumerate(pairwise(starts)):
            for t in range(start, end):
                pos = lengths[row] - end + t
                window = np.arange(max(0, pos - self.window + 1), pos + 1)
                seen = list(states[tables[row, window // self.page], window % self.page])
                if self.ratio:
                    named = np.arange((pos + 1) // self.ratio)
                    if picks is not None:
                        named = np.array([e for e in np.asarray(picks)[t] if 0 <= e < len(named)], np.int64)
                    size = Entries((), self.ratio, self.entry_page).page
                    at = (np.asarray(entry_tables)[row, named // size], named % size)
                    seen += list(self._decoded(arguments.pages[1], size)[at])
                out[t], lse[t] = oracle.attention(np.asarray(q)[t], seen, self.sm_scale, sinks)
        return Results((out, lse), ())

    def _decoded(self, pages: Any, page_size: int) -> np.ndarray:
        """float64[pages, page_size, dim] of an array of pages."""
        return decoded(by_state(np.asarray(pages))[:, :page_size, : self.format.width(self.dim)], self.format, self.dim)

    def assert_right(self, found: Results, arguments: Arguments) -> None:
        """Head by head: a huge sink of one would hide what is wrong in others."""
        assert_heads_close(found.outs, self.expected(arguments).outs)


def layer_sizes(layer: str) -> Sizes:
    """What a kind of layer says: an indexer picks where the ratio is 4."""
    if layer == "ratio 4":
        return {"ratio": 4}
    return {"ratio": 0 if layer == "window" else 128, "topk": 0}


CASES = (SparseCase,)
