"""Cases of kv_write: the new K and V of a decode step and of a prefill, at the shapes of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import slots
from pallas_kernels.cases.case import Arguments, Results, Sizes, Step, Work, itemsize
from pallas_kernels.cases.kv_case import KVCase
from pallas_kernels.cases.numbers import DTYPES, hard_values, hidden, one_of, random_array, random_values
from pallas_kernels.cases.pages import pool_pages, random_pages, random_platform, whole_rows
from pallas_kernels.kv_write import kv_write, oracle
from pallas_kernels.ragged_paged_attention.shapes import SHAPES


@dataclass(frozen=True)
class WriteCase(KVCase):
    """One call of kv_write."""

    q_dtype: str = "bfloat16"  # of what is written
    tokens: int = 512
    scattered: int = 0  # a token a page; else pages are filled one after the other
    scales: str = ""  # "one" or "heads": a scale, or one for each head

    op = "kv_write"
    shapes = SHAPES
    kinds = slots.KINDS
    backends = ("reference", "tpu", "gpu")
    features = ("dtype=float8_e4m3fn",)

    @classmethod
    def of_kind(cls, kind: str, step: Step) -> Sizes:
        """The sizes of `slots`."""
        return slots.of_kind(kind, step)

    @classmethod
    def random(cls, rng: np.random.Generator, backend: str) -> WriteCase:
        """A case of any dtype, sizes and scales."""
        heads = one_of(rng, [1, 2, 3, 8])
        dtype = one_of(rng, DTYPES if backend == "tpu" else (*DTYPES, "float16"))
        platform = random_platform(rng, backend)
        return cls(
            platform=platform,
            kv_heads=heads,
            head_dim=one_of(rng, [1, 64, 80, 128, 192]),
            page=whole_rows(one_of(rng, [1, 5, 8, 16, 64, 256]), heads, dtype, platform),
            dtype=dtype,
            q_dtype=one_of(rng, ["bfloat16", "float32"]),
            tokens=one_of(rng, [1, 7, 70]),
            num_pages=one_of(rng, [2, 9]),
            scales=one_of(rng, ["", "one", "heads"]),
        )

    @property
    def writes(self) -> bool:
        """It does nothing else."""
        return True

    @property
    def size(self) -> str:
        """Tokens."""
        return f"{self.tokens} tokens"

    @property
    def work(self) -> Work:
        """New K and V read, and written into pages."""
        numbers = 2 * self.tokens * self.kv_heads * self.head_dim
        return Work(numbers * (itemsize(self.q_dtype) + itemsize(self.dtype)), 0)

    @property
    def _new_shape(self) -> tuple[int, int, int]:
        return self.tokens, self.kv_heads, self.head_dim

    def arguments(self, seed: int) -> Arguments:
        """rest: new K, new V, slots, scales."""
        rng = np.random.default_rng(seed)
        filled = slots.num_filled(self.tokens, self.page, scattered=bool(self.scattered))
        num_pages = self.num_pages or pool_pages(self.layout, filled)
        pages = random_pages(rng, self.layout, num_pages)
        k, v = (random_array(rng, self._new_shape, self.q_dtype) for _ in range(2))
        where = slots.new_slots(rng, self.tokens, num_pages, self.page, scattered=bool(self.scattered))
        return Arguments(pages, (k, v, where, self._random_scales(rng)))

    def hard_arguments(self, rng: np.random.Generator) -> Arguments:
        """NaN in all pages but the null page; scales are powers of two, so that quotients are exact."""
        pages = tuple(random_values(rng, array.shape(self.num_pages), self.dtype) for array in self.layout.arrays)
        for array in pages:
            array[1:] = hidden(array.dtype)
        k, v = (jnp.asarray(hard_values(rng, self._new_shape, self.q_dtype)) for _ in range(2))
        where = slots.hard_slots(rng, self.tokens, self.num_pages * self.page)
        return Arguments(tuple(map(jnp.asarray, pages)), (k, v, where, self._random_scales(rng)))

    def _random_scales(self, rng: np.random.Generator) -> dict[str, Any]:
        """By the op's names."""
        shape = {"": None, "one": (), "heads": (self.kv_heads,)}[self.scales]
        names = () if shape is None else ("k_scale", "v_scale")
        return {name: jnp.asarray(2.0 ** rng.integers(-3, 4, shape), jnp.float32) for name in names}

    def call(self, backend: str, pages: tuple[Any, ...], rest: Any) -> Results:
        """The pages are the result."""
        k, v, where, scales = rest
        return Results((), kv_write(k, v, pages, where, **scales, backend=backend))

    def expected(self, arguments: Arguments) -> Results:
        """By the oracle."""
        k, v, where, scales = arguments.rest
        new = (np.asarray(k), np.asarray(v))
        given = (scales.get("k_scale"), scales.get("v_scale"))
        pages = tuple(np.asarray(array) for array in arguments.pages)
        return Results((), oracle.kv_write(new, pages, np.asarray(where), self.page, given))


CASES = (WriteCase,)
