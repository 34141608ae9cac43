"""Cases of compressor_update: states and entries of a decode step and of a prefill, for each compressor of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import case, steps
from pallas_kernels.cases.case import Arguments, Results, Sizes, Work, itemsize
from pallas_kernels.cases.compare import assert_close, assert_same
from pallas_kernels.cases.latents import by_state, with_states
from pallas_kernels.cases.numbers import one_of, random_array, random_values
from pallas_kernels.cases.pages import random_pages, random_platform
from pallas_kernels.cases.steps import Rows, Step, StepCase, hard_rows, hard_step
from pallas_kernels.compressor_update import compressor_update, max_new_entries, oracle
from pallas_kernels.layouts import PageLayout, cdiv, latent_layout
from pallas_kernels.mask import MaskRule
from pallas_kernels.sparse_mla_attention.shapes import SHAPES, SparseShape

_STATE_BYTES = 4  # of a number: states are float32


@dataclass(frozen=True)
class CompressorCase(StepCase):
    """One call of compressor_update. Where an entry has few tokens it pools those of the entry before, too."""

    context: int = 131072
    ratio: int = 4  # tokens of an entry
    dim: int = 512  # of an entry
    page: int = 4  # states
    overlap: int = 1
    staggered: int = 0  # sequences are a token shorter, one after the other, so that one in `ratio` completes an entry
    q_dtype: str = "bfloat16"

    op = "compressor_update"
    shapes = SHAPES
    kinds = tuple(f"{kind} {of}" for kind in ("decode", "prefill") for of in ("ratio 4", "ratio 128", "indexer"))
    backends = ("reference", "xla", "tpu", "triton")
    compiled = ("tpu",)

    @classmethod
    def of_shape(cls, shape: SparseShape, num_shards: int) -> Sizes:
        """Every shard has all states; which compressor it is the kind says."""
        return {}

    @classmethod
    def of_kind(cls, kind: str, step: case.Step) -> Sizes:
        """Decoding sequences of lengths one after the other, or one prompt."""
        name, _, of = kind.partition(" ")
        pool = {"pool": int(not step.small)}
        if name == "prefill":
            length = 135 if step.small else step.context or 8192
            return compressor(of) | steps.of_rows(((length, length),)) | pool
        longest, count = (256, 4) if step.small else (step.context or 4096, step.batch or 64)
        return compressor(of) | {"tokens": count, "seqs": count, "context": longest, "staggered": 1} | pool

    @classmethod
    def to_compile(cls, shape: SparseShape, num_shards: int) -> Iterator[tuple[str, Sizes]]:
        """Each compressor."""
        for of in ("ratio 4", "ratio 128", "indexer"):
            yield f"{shape.name} {of}", compressor(of)

    @classmethod
    def random(cls, rng: np.random.Generator, backend: str) -> CompressorCase:
        """A case of any ratio and pages."""
        ratio, overlap = one_of(rng, [(4, 1), (8, 0), (1, 1), (3, 0), (5, 1), (16, 0), (48, 0)])
        return cls(
            platform=random_platform(rng, backend),
            tokens=24,
            seqs=3,
            context=64,
            ratio=ratio,
            dim=128 if backend == "tpu" else one_of(rng, [5, 128]),
            page=one_of(rng, [1, 3, 4, 8, 16]),
            overlap=overlap,
            q_dtype="float32",
        )

    @property
    def width(self) -> int:
        """Numbers of KV of a token, and of scores."""
        return self.dim * (1 + self.overlap)

    @property
    def layout(self) -> PageLayout:
        """The layout of the states' pages."""
        return latent_layout(
            head_dim=2 * self.width, page_size=self.page, dtype="float32", platform=self.platform
        )  # fmt: skip

    @property
    def step_rows(self) -> Rows:
        """The rows of `arguments`."""
        if not self.staggered:
            return super().step_rows
        return tuple((1, max(1, self.context - i)) for i in range(self.seqs))

    @property
    def size(self) -> str:
        """The sequences in words."""
        return f"{self.seqs}x, up to {self.context}" if self.staggered else super().size

    @property
    def writes(self) -> bool:
        """The new states."""
        return True

    @property
    def work(self) -> Work:
        """KV and scores of new tokens read, their states and the completed entries written; of older tokens what those
        entries pool is read, each number once. An addition of each new score, three operations of each pooled number.
        """
        ratio, pooled, old, num_entries = self.ratio, 0, 0, 0
        for q_len, length in self.step_rows:
            computed = length - q_len
            for entry in range(computed // ratio, length // ratio):
                first, own = max(0, ratio * (entry - self.overlap)), ratio * entry
                num_entries += 1
                pooled += ratio * (entry + 1) - first
                old += max(0, min(computed, own) - first) + max(0, computed - own)
        new = self.tokens * self.width
        num_bytes = 2 * new * (itemsize(self.q_dtype) + _STATE_BYTES)
        num_bytes += (2 * old + num_entries) * self.dim * _STATE_BYTES
        return Work(num_bytes, new + 3 * pooled * self.dim)

    def arguments(self, seed: int) -> Arguments:
        """pages: the states; rest: KV, scores, step, slots, bias."""
        rng = np.random.default_rng(seed)
        mask = MaskRule(sliding_window=self.ratio * (1 + self.overlap))  # tokens whose states an entry pools
        step = Step(self.step_rows, mask, self.page)
        pages = random_pages(rng, self.layout, self.num_pages(self.layout, step.num_pages - 1))
        ints = step.ints(rng)
        kv, scores = (random_array(rng, (self.tokens, self.width), self.q_dtype) for _ in range(2))
        bias = random_array(rng, (self.ratio, self.width), "float32")
        return Arguments(pages, (kv, scores, steps.on_device(*ints), step.new_slots(ints[0]), bias))

    def hard_arguments(self, rng: np.random.Generator) -> Arguments:
        """The arguments of a step whose sequences end beside the ends of pages."""
        return self.step(rng, hard_rows(rng, self.tokens, self.seqs, self.page, self.context, False))

    def step(self, rng: np.random.Generator, rows: list[tuple[int, int]]) -> Arguments:
        """Sequences whose states from before are those of their last tokens; NaN in all other slots."""
        lengths, starts, distribution = hard_step(rows, self.seqs)
        columns = cdiv(self.context, self.page)
        pages = np.full(self.layout.arrays[0].shape(1 + self.seqs * columns), np.nan, np.float32)
        pages[0] = 0
        states = by_state(pages)
        tables = np.zeros((self.seqs, columns), np.int32)
        free = iter(rng.permutation(np.arange(1, pages.shape[0])))
        slots = np.full(self.tokens, -1, np.int32)
        for row, (q_len, length) in enumerate(rows):
            computed = length - q_len
            kept = np.arange(max(0, computed - self.ratio * (1 + self.overlap) + 1), length)
            for column in sorted(set((kept // self.page).tolist())):
                tables[row, column] = next(free)
            places = tables[row, kept // self.page] * self.page + kept % self.page
            slots[starts[row] : starts[row + 1]] = places[kept >= computed]
            for place in places[kept < computed]:
                states[place // self.page, place % self.page, : 2 * self.width] = rng.standard_normal(2 * self.width)
        kv, scores = (jnp.asarray(random_values(rng, (self.tokens, self.width), self.q_dtype)) for _ in range(2))
        bias = jnp.asarray(random_values(rng, (self.ratio, self.width), "float32"))
        step = steps.on_device(tables, lengths, starts, distribution)
        return Arguments((jnp.asarray(with_states(pages, states)),), (kv, scores, step, jnp.asarray(slots), bias))

    def call(self, backend: str, pages: tuple[Any, ...], rest: Any) -> Results:
        """Entries with their positions, and the states."""
        kv, scores, step, slots, bias = rest
        options: dict[str, Any] = {"position_bias": bias, "overlap": bool(self.overlap), "page_size": self.page}
        result = compressor_update(kv, scores, pages, *(*step, slots), backend=backend, **options)
        return Results((result.entries, result.positions), result.pages)

    def expected(self, arguments: Arguments) -> Results:
        """By the oracle, over the states that pages hold and the new ones."""
        kv, scores, step, _, bias = arguments.rest
        tables, lengths, starts, _ = map(np.asarray, step)
        page, bias = np.asarray(arguments.pages[0]), np.asarray(bias)
        found = by_state(page)
        entries, positions = [], []
        for row, (start, end) in enumerate(pairwise(starts)):
            tokens = np.arange(lengths[row] - (end - start), lengths[row])
            at = (tables[row, tokens // self.page], tokens % self.page)
            biased = np.asarray(scores)[start:end] + bias[tokens % self.ratio]
            found[at] = 0
            found[(*at, slice(2 * self.width))] = np.concatenate([np.asarray(kv)[start:end], biased], axis=-1)
            every = np.arange(lengths[row])
            states = found[tables[row, every // self.page], every % self.page, : 2 * self.width]
            for entry in range(int(lengths[row] - (end - start)) // self.ratio, int(lengths[row]) // self.ratio):
                first = self.ratio * max(0, entry - self.overlap)
                own = states[first : self.ratio * (entry + 1)]
                kv_of, biased = np.split(own, 2, axis=-1)
                entries.append(oracle.compressed(kv_of, biased, 0 * bias, bool(self.overlap))[-1])
                positions.append(entry * self.ratio)
        room = max_new_entries(self.tokens, self.seqs, self.ratio)
        padding = room - len(entries)
        outs = np.array([*entries, *np.zeros((padding, self.dim))]).reshape(room, self.dim)
        pages = (with_states(page, found),)
        return Results((outs, np.array([*positions, *[-1] * padding], np.int32)), pages)

    def assert_right(self, found: Results, arguments: Arguments) -> None:
        """Scores in pages are sums, which an implementation may round in its own order: all else bit for bit."""
        expected = self.expected(arguments)
        assert_close(found.outs, expected.outs)
        (got,), (want,) = found.pages, expected.pages
        written = np.unique(np.asarray(arguments.rest[3])) // self.page
        others = np.setdiff1d(np.arange(len(got)), written[written > 0])
        assert_same(got[others], want[others])
        hidden = np.isnan(want)
        assert (np.isnan(got) == hidden).all(), "NaN stands in other states"
        assert_close(np.where(hidden, 0, got), np.where(hidden, 0, want))


def compressor(of: str) -> Sizes:
    """Ratio, numbers and pages of a compressor of DeepSeek V4, as vLLM has them."""
    ratio = 128 if of == "ratio 128" else 4
    return {
        "ratio": ratio,
        "dim": 128 if of == "indexer" else 512,
        "page": 8 if ratio == 128 else 4,
        "overlap": int(ratio == 4),
    }


CASES = (CompressorCase,)
