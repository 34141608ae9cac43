"""Cases of ring_scan: decode steps and drafts, at the shapes of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases.case import Arguments, Results, Sizes, Work, itemsize
from pallas_kernels.cases.numbers import one_of, random_array, random_values
from pallas_kernels.cases.rings import Arrays, RingCase, RingStep
from pallas_kernels.ring_scan import ScanRing, oracle, ring_scan
from pallas_kernels.ring_scan.api import ring_page_shapes
from pallas_kernels.ring_scan.oracle import OF_TOKENS, RING
from pallas_kernels.ring_scan.shapes import SHAPES
from pallas_kernels.ssm_update.shapes import SsmShape

_FLOPS = 2  # of a number of the base state and a token: times c, summed


@dataclass(frozen=True)
class RingScanCase(RingCase):
    """One call of ring_scan."""

    heads: int = 80
    head_dim: int = 64
    state_dim: int = 128
    groups: int = 1
    in_rows: int = 1  # whether slots are whole rows of 128 words, else shaped as inputs are
    least_dt: float = 0.0
    most_dt: float = float("inf")

    op = "ring_scan"
    shapes = SHAPES
    backends = ("reference", "xla", "tpu")
    compiled = ("tpu",)
    of_tokens = OF_TOKENS
    ring_arrays = RING
    copied = ("xs", "bs")

    @classmethod
    def of_shape(cls, shape: SsmShape, num_shards: int) -> Sizes:
        """Heads and groups of a shard."""
        heads, groups = shape.per_shard(num_shards)
        return {"heads": heads, "head_dim": shape.head_dim, "state_dim": shape.state_dim, "groups": groups}

    @classmethod
    def random(cls, rng: np.random.Generator, backend: str) -> RingScanCase:
        """A case of any dtypes, limits and shapes of slots."""
        is_tpu = backend == "tpu"
        of_tpu, others = (
            [(4, 64, 128, 2), (8, 32, 128, 1), (48, 8, 128, 3)],
            [(6, 3, 4, 2), (80, 8, 16, 1), (1, 1, 1, 1)],
        )
        heads, head_dim, state_dim, groups = one_of(rng, of_tpu if is_tpu else others)
        dtypes = ["float32", "bfloat16"] if is_tpu else ["float32", "bfloat16", "float16"]
        limit = one_of(rng, [(0.0, float("inf")), (0.0, 3.0), (0.1, 2.0)])
        slots = one_of(rng, [8, 16] if is_tpu else [1, 4, 8])
        return cls(
            tokens=one_of(rng, [1, 9, 20]),
            seqs=6,
            slots=slots,
            most_new=int(rng.integers(1, min(slots, 5) + 1)),
            num_pages=30,
            q_dtype=one_of(rng, dtypes),
            state_dtype=one_of(rng, dtypes),
            heads=heads,
            head_dim=head_dim,
            state_dim=state_dim,
            groups=groups,
            in_rows=1 if is_tpu else int(rng.integers(2)),
            least_dt=limit[0],
            most_dt=limit[1],
        )

    @property
    def limit(self) -> tuple[float, float]:
        """The limits of time steps."""
        return self.least_dt, self.most_dt

    @property
    def page_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """(shape, dtype) of a page of each array."""
        states = {"states": ((self.heads, self.head_dim, self.state_dim), self.state_dtype)}
        if self.in_rows:
            sizes = (self.slots, self.heads, self.head_dim, self.groups, self.state_dim)
            return states | dict(zip(RING, ring_page_shapes(*sizes, self.q_dtype), strict=True))
        return states | {
            "xs": ((self.slots, self.heads, self.head_dim), self.q_dtype),
            "dts": ((self.slots, self.heads), "float32"),
            "bs": ((self.slots, self.groups, self.state_dim), self.q_dtype),
        }

    @property
    def work(self) -> Work:
        """Inputs read, outputs written; base states and held entries read, new entries and a few states written."""
        inner = self.heads * self.head_dim
        token = 2 * inner + self.heads + 2 * self.groups * self.state_dim
        num_bytes = self.tokens * token * itemsize(self.q_dtype) + 4 * 3 * self.heads
        return Work(num_bytes + self.moved_bytes, _FLOPS * self.tokens * inner * self.state_dim)

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the inputs of every token, then of weights, by name."""
        of_head, of_group = (self.tokens, self.heads), (self.tokens, self.groups, self.state_dim)
        of_tokens = {"x": (*of_head, self.head_dim), "dt": of_head, "b": of_group, "c": of_group}
        return of_tokens | dict.fromkeys(("a", "d", "dt_bias"), (self.heads,))

    def arguments(self, seed: int) -> Arguments:
        """rest: inputs and weights by name, step."""
        rng = np.random.default_rng(seed)
        states, xs, dts, bs = self.random_pages(rng)
        dtypes = dict.fromkeys(OF_TOKENS, self.q_dtype)
        inputs = {name: random_array(rng, shape, dtypes.get(name, "float32")) for name, shape in self._shapes.items()}
        inputs |= {"a": -jnp.exp(inputs["a"])}
        return Arguments((states, xs, jax.nn.softplus(dts), bs), (inputs, self.step_arrays(rng)))

    def inputs(self, rng: np.random.Generator) -> Arrays:
        """By name."""
        dtypes = dict.fromkeys(OF_TOKENS, self.q_dtype)
        arrays = {name: random_values(rng, shape, dtypes.get(name, "float32")) for name, shape in self._shapes.items()}
        return arrays | {"a": -np.exp(arrays["a"])}

    def hard_ring(self, rng: np.random.Generator) -> Arrays:
        """Inputs, time steps and b as tokens have them; any numbers in the padding of slots."""
        shapes = {name: ((self.num_pages, *shape), dtype) for name, (shape, dtype) in self.page_shapes.items()}
        ring = {name: random_values(rng, *shapes[name]) for name in RING}
        return ring | {"dts": np.clip(np.abs(ring["dts"]), *self.limit).astype(np.float32)}

    def call(self, backend: str, pages: tuple[Any, ...], rest: Any) -> Results:
        """Outputs, states and ring."""
        inputs, step = rest
        states, *ring = (pages[i] for i in range(len(self.page_shapes)))
        arrays = (inputs["x"], states, *(inputs[name] for name in ("dt", "a", "b", "c")), ScanRing(*ring))
        options = {name: inputs[name] for name in ("d", "dt_bias")} | {"dt_limit": self.limit, "backend": backend}
        result = ring_scan(*arrays, *step, max_new_tokens=self.most_new, **options)
        return Results(result.out, (result.states, *result.ring))

    def oracle(self, arrays: Arrays, step: RingStep) -> tuple[np.ndarray, Arrays]:
        """(out, pages by name)."""
        return oracle.ring_scan(arrays, step, self.limit, self.most_new)


CASES = (RingScanCase,)
