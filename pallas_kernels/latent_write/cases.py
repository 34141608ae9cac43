"""Cases of latent_write: the new latents of a decode step and of a prefill, at the shapes of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import slots
from pallas_kernels.cases.case import Arguments, Case, Results, Sizes, Step, Work, itemsize
from pallas_kernels.cases.numbers import DTYPES, hard_values, hidden, one_of, random_array, random_values
from pallas_kernels.cases.pages import pool_pages, random_pages, random_platform
from pallas_kernels.latent_write import latent_write, oracle
from pallas_kernels.layouts import PageLayout, latent_layout
from pallas_kernels.mla_paged_attention.shapes import SHAPES, LatentShape


@dataclass(frozen=True)
class LatentWriteCase(Case):
    """One call of latent_write, of plain entries."""

    dim: int = 576  # of a state
    page: int = 128  # states
    dtype: str = "bfloat16"  # of the pages
    q_dtype: str = "bfloat16"  # of what is written
    tokens: int = 512
    scattered: int = 0  # a state a page; else pages are filled one after the other
    num_pages: int = 0  # 0: a pool
    scale: float = 0.0  # 0: none

    op = "latent_write"
    shapes = SHAPES
    kinds = slots.KINDS
    backends = ("reference", "tpu", "gpu")

    @classmethod
    def of_shape(cls, shape: LatentShape, num_shards: int) -> Sizes:
        """Every shard holds all latents."""
        return {"dim": shape.latent_dim + shape.rope_dim}

    @classmethod
    def of_kind(cls, kind: str, step: Step) -> Sizes:
        """The sizes of `slots`."""
        return slots.of_kind(kind, step)

    @classmethod
    def random(cls, rng: np.random.Generator, backend: str) -> LatentWriteCase:
        """A case of any dtype and sizes; words that two states share, whole or not, are among them."""
        return cls(
            platform=random_platform(rng, backend),
            dim=one_of(rng, [24, 128, 200]),
            page=one_of(rng, [1, 5, 6, 8, 16, 64]),
            dtype=one_of(rng, DTYPES),
            q_dtype="float32",
            tokens=one_of(rng, [1, 9, 50]),
            num_pages=9,
            scale=one_of(rng, [0.0, 2.0, 0.25]),
        )

    @property
    def layout(self) -> PageLayout:
        """The layout of the pages."""
        return latent_layout(head_dim=self.dim, page_size=self.page, dtype=self.dtype, platform=self.platform)

    @property
    def writes(self) -> bool:
        """It does nothing else."""
        return True

    @property
    def size(self) -> str:
        """States."""
        return f"{self.tokens} tokens"

    @property
    def work(self) -> Work:
        """New states read, and written into pages."""
        return Work(self.tokens * self.dim * (itemsize(self.q_dtype) + itemsize(self.dtype)), 0)

    def arguments(self, seed: int) -> Arguments:
        """rest: states, scale, slots."""
        rng = np.random.default_rng(seed)
        filled = slots.num_filled(self.tokens, self.page, scattered=bool(self.scattered))
        num_pages = self.num_pages or pool_pages(self.layout, filled)
        pages = random_pages(rng, self.layout, num_pages)
        states = random_array(rng, (self.tokens, self.dim), self.q_dtype)
        where = slots.new_slots(rng, self.tokens, num_pages, self.page, scattered=bool(self.scattered))
        return Arguments(pages, (states, self._scale, where))

    def hard_arguments(self, rng: np.random.Generator) -> Arguments:
        """Random states in pages, of whose padding and every other state nobody knows anything."""
        page = random_values(rng, self.layout.arrays[0].shape(self.num_pages), self.dtype)
        page[1::2] = hidden(page.dtype)
        states = jnp.asarray(hard_values(rng, (self.tokens, self.dim), self.q_dtype))
        return Arguments(
            (jnp.asarray(page),), (states, self._scale, slots.hard_slots(rng, self.tokens, self.num_pages * self.page))
        )

    @property
    def _scale(self) -> Any:
        return jnp.float32(self.scale) if self.scale else None

    def call(self, backend: str, pages: tuple[Any, ...], rest: Any) -> Results:
        """The pages are the result."""
        states, scale, where = rest
        return Results((), latent_write(states, pages, where, scale=scale, page_size=self.page, backend=backend))

    def expected(self, arguments: Arguments) -> Results:
        """By the oracle."""
        states, scale, where = arguments.rest
        page = np.asarray(arguments.pages[0])
        return Results((), (oracle.latent_write(np.asarray(states), page, np.asarray(where), self.page, scale),))


CASES = (LatentWriteCase,)
