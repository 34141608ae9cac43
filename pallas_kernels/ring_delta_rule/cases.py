"""Cases of ring_delta_rule: decode steps and drafts, at the shapes of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases.case import Arguments, Results, Sizes, Work, itemsize
from pallas_kernels.cases.numbers import one_of, random_array, random_values
from pallas_kernels.cases.rings import Arrays, RingCase, RingStep
from pallas_kernels.gated_delta_rule.shapes import SHAPES, DeltaShape, OfDeltaLayer
from pallas_kernels.ring_delta_rule import DeltaRing, oracle, ring_delta_rule
from pallas_kernels.ring_delta_rule.arguments import Inputs
from pallas_kernels.ring_delta_rule.oracle import INPUTS

_GATE_BYTES = 4
_FLOPS = 5  # of a number of the base state and a token: decay; times k, summed; times q, summed


@dataclass(frozen=True)
class RingDeltaCase(OfDeltaLayer, RingCase):
    """One call of ring_delta_rule."""

    key_heads: int = 32
    heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    per_channel: int = 1  # a decay for every number of the key
    l2norm: int = 1
    scale: float = 0.0  # 0: by the key's numbers
    delta_dtype: str = "float32"
    decay_dtype: str = "float32"

    op = "ring_delta_rule"
    shapes = SHAPES
    backends = ("reference", "xla", "tpu")
    compiled = ("tpu",)
    of_tokens = INPUTS
    ring_arrays = ("keys", "deltas", "decays")
    copied = ("keys", "decays")

    @classmethod
    def of_shape(cls, shape: DeltaShape, num_shards: int) -> Sizes:
        """Heads of a shard."""
        return shape.sizes(num_shards)

    @classmethod
    def random(cls, rng: np.random.Generator, backend: str) -> RingDeltaCase:
        """A case of either kind of decays, any dtypes and options; for TPU one whose pages fill rows of slabs."""
        sizes = [(2, 4, 4, 3), (1, 3, 1, 1), (2, 2, 16, 16)]
        if backend == "tpu":
            sizes = [(1, 2, 128, 128), (2, 2, 128, 128), (8, 16, 128, 128)]
        key_heads, heads, key_dim, value_dim = one_of(rng, sizes)
        dtypes = ["float32", "bfloat16", *["float16"] * (backend != "tpu")]
        slots, per_channel = one_of(rng, [1, 4, 8]), int(rng.integers(2))
        if backend == "tpu":
            per_channel = per_channel if heads == 16 else 1
            slots = max(4, slots) if per_channel else 8
        return cls(
            tokens=one_of(rng, [1, 9, 20]),
            seqs=6,
            slots=slots,
            most_new=int(rng.integers(1, min(slots, 5) + 1)),
            num_pages=30,
            q_dtype=one_of(rng, dtypes),
            state_dtype=one_of(rng, dtypes),
            key_heads=key_heads,
            heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            per_channel=per_channel,
            l2norm=int(rng.integers(2)),
            scale=0.7,
            delta_dtype=one_of(rng, dtypes[:2]),
            decay_dtype=one_of(rng, dtypes[:2]),
        )

    @property
    def page_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """(shape, dtype) of a page of each array."""
        decays = (self.heads, self.key_dim) if self.per_channel else (self.heads,)
        return {
            "states": ((self.heads, self.key_dim, self.value_dim), self.state_dtype),
            "keys": ((self.slots, self.key_heads, self.key_dim), self.q_dtype),
            "deltas": ((self.slots, self.heads, self.value_dim), self.delta_dtype),
            "decays": ((self.slots, *decays), self.decay_dtype),
        }

    @property
    def work(self) -> Work:
        """Inputs read, outputs written; base states and held entries read, new entries and a few states written."""
        numbers = 2 * self.key_heads * self.key_dim + 2 * self.heads * self.value_dim
        gates = self.heads * (1 + (self.key_dim if self.per_channel else 1))
        num_bytes = self.tokens * (numbers * itemsize(self.q_dtype) + gates * _GATE_BYTES)
        state = self.heads * self.key_dim * self.value_dim
        return Work(num_bytes + self.moved_bytes, _FLOPS * self.tokens * state)

    def arguments(self, seed: int) -> Arguments:
        """rest: inputs by name, step."""
        rng = np.random.default_rng(seed)
        states, keys, deltas, decays = self.random_pages(rng)
        dtypes = dict.fromkeys(("q", "k", "v"), self.q_dtype)
        shapes = self.input_shapes.items()
        inputs = {name: random_array(rng, shape, dtypes.get(name, "float32")) for name, shape in shapes}
        inputs |= {"g": -jnp.exp(inputs["g"]), "beta": jax.nn.sigmoid(inputs["beta"])}
        return Arguments((states, keys, deltas, -jnp.exp(decays)), (inputs, self.step_arrays(rng)))

    def inputs(self, rng: np.random.Generator) -> Arrays:
        """Some decays are so strong that their sums leave what float32's exponential can hold."""
        arrays = {name: random_values(rng, self.input_shapes[name], self.q_dtype) for name in ("q", "v")}
        decays, keys = self._decays(rng, self.input_shapes["g"]), self._keys(rng, self.input_shapes["k"])
        return arrays | {"k": keys, "g": decays, "beta": rng.random(self.input_shapes["beta"]).astype(np.float32)}

    def hard_ring(self, rng: np.random.Generator) -> Arrays:
        """Keys, deltas and decays as inputs have them."""
        shapes = {name: (self.num_pages, *shape) for name, (shape, _) in self.page_shapes.items()}
        return {
            "keys": self._keys(rng, shapes["keys"]),
            "deltas": random_values(rng, shapes["deltas"], self.delta_dtype),
            "decays": self._decays(rng, shapes["decays"]).astype(jnp.dtype(self.decay_dtype)),
        }

    def _keys(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        keys = random_values(rng, shape, self.q_dtype)
        return keys if self.l2norm else (keys.astype(np.float32) * self.key_dim**-0.5).astype(keys.dtype)

    def _decays(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return (-np.exp(2 * rng.standard_normal(shape))).astype(np.float32)

    def call(self, backend: str, pages: tuple[Any, ...], rest: Any) -> Results:
        """Outputs, states and ring."""
        inputs, step = rest
        states, *ring = (pages[i] for i in range(len(self.page_shapes)))
        options: dict[str, Any] = {"scale": self.scale or None, "use_qk_l2norm": bool(self.l2norm), "backend": backend}
        result = ring_delta_rule(
            *Inputs(**inputs), states, DeltaRing(*ring), *step, max_new_tokens=self.most_new, **options
        )
        return Results(result.out, (result.states, *result.ring))

    def oracle(self, arrays: Arrays, step: RingStep) -> tuple[np.ndarray, Arrays]:
        """(out, pages by name)."""
        scale = self.scale or self.key_dim**-0.5
        return oracle.ring_delta_rule(arrays, step, scale, bool(self.l2norm), self.most_new)


CASES = (RingDeltaCase,)
