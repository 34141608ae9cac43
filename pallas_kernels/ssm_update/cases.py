"""Cases of causal_conv1d and selective_scan: decode steps, drafts and prefills, at the shapes of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases.case import Arguments, Results, Sizes, Work, itemsize
from pallas_kernels.cases.numbers import one_of, random_array, random_values
from pallas_kernels.cases.states import Arrays, StateCase, Step, hard_arguments, hard_counts
from pallas_kernels.gated_delta_rule.shapes import SHAPES as DELTA_SHAPES
from pallas_kernels.gated_delta_rule.shapes import DeltaShape
from pallas_kernels.ssm_update import causal_conv1d, gpu_conv, oracle, selective_scan, tpu_conv, xla_scan
from pallas_kernels.ssm_update.arguments import Convolution, Scan
from pallas_kernels.ssm_update.shapes import SHAPES, SsmShape
from pallas_kernels.ssm_update.triton_scan import Sizes as TritonSizes
from pallas_kernels.state_step import StepArrays

# Of a number of the scan's state and a token: decay, input times b, their sum, times c, summed.
_SCAN_FLOPS = 5


@dataclass(frozen=True)
class ConvCase(StateCase):
    """One call of causal_conv1d. Its states have the dtype of its inputs."""

    channels: int = 5376
    taps: int = 4
    has_bias: int = 1
    activation: str = "silu"  # or "": none
    chunk: int = 0  # tokens that a kernel takes at a time; 0: as it chooses

    op = "causal_conv1d"
    copies_states = True
    shapes = (*SHAPES, *DELTA_SHAPES)
    backends = ("reference", "tpu", "gpu")
    features = ("tokens=64", "tokens=64 model=jamba-1.5-mini", "q_dtype=float32 state_dtype=float32")

    @classmethod
    def of_shape(cls, shape: SsmShape | DeltaShape, num_shards: int) -> Sizes:
        """Channels of a shard."""
        channels, before = shape.state_shapes(num_shards)[0]
        return {"channels": channels, "taps": before + 1}

    @classmethod
    def random(cls, rng: np.random.Generator, backend: str) -> ConvCase:
        """A case of any taps and options."""
        dtype, tokens = one_of(rng, ["float32", "bfloat16"]), one_of(rng, [1, 5, 24, 70])
        return cls(
            tokens=min(tokens, 24) if backend == "gpu" else tokens,
            seqs=6,
            kept=one_of(rng, [1, 3]),
            num_pages=30,
            q_dtype=dtype,
            state_dtype=dtype,
            channels=one_of(rng, [1, 24, 256] if backend == "reference" else [128, 256, 1152]),
            taps=one_of(rng, [2, 3, 4, 9]),
            has_bias=int(rng.integers(2)),
            activation=one_of(rng, ["", "silu"]),
            chunk={"tpu": one_of(rng, [32, 64]), "gpu": 9}.get(backend, 0),
            checkpoints=one_of(rng, [0, 2]),
        )

    @property
    def state_shape(self) -> tuple[int, int]:
        """The last inputs of a sequence."""
        return self.channels, self.taps - 1

    @property
    def work(self) -> Work:
        """Inputs, weights and bias read, outputs written; each state written, and one read by each sequence that has
        it. A product and an addition for each tap of an output, its activation apart."""
        weights, states = self.channels * (self.taps + 1), self.num_moved * self.channels * (self.taps - 1)
        numbers = 2 * self.tokens * self.channels + weights + states
        return Work(numbers * itemsize(self.q_dtype), 2 * self.tokens * self.channels * self.taps)

    def arguments(self, seed: int) -> Arguments:
        """rest: x, weight and bias by name, step."""
        rng = np.random.default_rng(seed)
        states = random_array(rng, (self.pool_pages, *self.state_shape), self.q_dtype).at[0].set(0)
        shapes = {"x": (self.tokens, self.channels), "weight": (self.channels, self.taps), "bias": (self.channels,)}
        inputs = {name: random_array(rng, shape, self.q_dtype) for name, shape in shapes.items()}
        return Arguments((states,), (inputs, self.step_arrays(rng)))

    def inputs(self, rng: np.random.Generator) -> Arrays:
        """x, weight and bias."""
        return {
            "x": random_values(rng, (self.tokens, self.channels), self.q_dtype),
            "weight": random_values(rng, (self.channels, self.taps), "float32"),
            "bias": random_values(rng, (self.channels,), "float32") if self.has_bias else None,
        }

    def step(self, rng: np.random.Generator, q_lens: Sequence[int]) -> tuple[Arrays, Step]:
        """A random step of sequences with so many new tokens."""
        return self.make(rng, q_lens, ("x",))

    def hard_arguments(self, rng: np.random.Generator) -> Arguments:
        """Sequences shorter than the state, among others."""
        return hard_arguments(rng, *self.step(rng, hard_counts(rng, self.tokens, self.seqs, (self.taps, 9, 32))))

    def call(self, backend: str, pages: tuple[Any, ...], rest: Any) -> Results:
        """Outputs and states."""
        inputs, step = rest
        x, weight, bias = (inputs[name] for name in ("x", "weight", "bias"))
        activation = self.activation or None
        if self.chunk:
            given = (Convolution(x, weight, bias), pages[0], StepArrays(*step).by_column())
            run = partial(tpu_conv.causal_conv1d, chunk=self.chunk)
            if backend == "gpu":
                run = partial(gpu_conv.causal_conv1d, piece=self.chunk)
            out, states = run(*given, activation=activation)
            return Results(out, (states,))
        result = causal_conv1d(x, pages[0], weight, *step, bias=bias, activation=activation, backend=backend)
        return Results(result.out, (result.states,))

    def oracle(self, arrays: Arrays, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """(out, states)."""
        x, states, weight, bias = (arrays[name] for name in ("x", "states", "weight", "bias"))
        return oracle.causal_conv1d(x, states, weight, bias, self.activation == "silu", step)


@dataclass(frozen=True)
class ScanCase(StateCase):
    """One call of selective_scan."""

    heads: int = 80  # Mamba 1: channels
    head_dim: int = 64  # 0: Mamba 1
    state_dim: int = 128
    groups: int = 1
    least_dt: float = 0.0
    most_dt: float = float("inf")
    chunk: int = 0  # tokens that the kernel in Triton takes at a time; 0: as it chooses

    op = "selective_scan"
    shapes = SHAPES
    backends = ("reference", "xla", "tpu", "gpu", "triton")
    features = (
        "tokens=64",
        "tokens=64 model=jamba-1.5-mini",
        "state_dtype=bfloat16",
        "q_dtype=float32",
        "model=jamba-1.5-mini state_dtype=bfloat16",
        "model=jamba-1.5-mini q_dtype=float32",
    )

    @classmethod
    def of_shape(cls, shape: SsmShape, num_shards: int) -> Sizes:
        """Heads and groups of a shard."""
        heads, groups = shape.per_shard(num_shards)
        return {"heads": heads, "head_dim": shape.head_dim or 0, "state_dim": shape.state_dim, "groups": groups}

    @classmethod
    def random(cls, rng: np.random.Generator, backend: str) -> ScanCase:
        """A case of either Mamba, any dtypes and limits."""
        is_mamba1 = bool(rng.integers(2))
        tokens, kept = one_of(rng, [1, 9, 40, 150]), one_of(rng, [1, 1, 3])
        if backend == "gpu":
            sizes = one_of(rng, [(64, 0, 8, 1), (128, 0, 24, 1), (160, 0, 16, 1)])
            if not is_mamba1:
                sizes = one_of(rng, [(4, 16, 64, 2), (2, 32, 32, 1), (2, 48, 32, 1), (5, 16, 96, 5), (3, 128, 48, 1)])
            tokens = min(tokens, 12)
        elif backend == "tpu":
            of_mamba2 = [(4, 64, 128, 2), (4, 32, 128, 1), (16, 8, 128, 1)]
            sizes = (128, 0, 8, 1) if is_mamba1 else one_of(rng, of_mamba2)
            tokens = min(tokens, 40) if is_mamba1 else tokens
        else:
            sizes = (6, 0, 4, 1) if is_mamba1 else one_of(rng, [(6, 3, 4, 2), (80, 64, 128, 1), (1, 1, 1, 1)])
        dtypes = ["float32", "bfloat16"] if backend == "tpu" else ["float32", "bfloat16", "float16"]
        limit = one_of(rng, [(0.0, float("inf")), (0.0, 3.0), (0.1, 2.0)])
        return cls(
            tokens=tokens,
            seqs=6,
            kept=kept,
            num_pages=16 + (kept - 1) * 6,
            q_dtype=one_of(rng, dtypes),
            state_dtype=one_of(rng, dtypes),
            heads=sizes[0],
            head_dim=sizes[1],
            state_dim=sizes[2],
            groups=sizes[3],
            least_dt=limit[0],
            most_dt=limit[1],
            chunk=one_of(rng, [16, 32]) if backend == "triton" else 0,
            checkpoints=0 if backend == "triton" else one_of(rng, [0, 2]),
        )

    @property
    def limit(self) -> tuple[float, float]:
        """The limits of time steps."""
        return self.least_dt, self.most_dt

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of a page."""
        return (self.heads, *((self.head_dim,) if self.head_dim else ()), self.state_dim)

    @property
    def work(self) -> Work:
        """x, dt, b, c and weights read, outputs written; each state written, and one read by each sequence that has
        it."""
        inner = self.heads * (self.head_dim or 1)
        state = inner * self.state_dim
        token = 2 * inner + self.heads + 2 * (self.groups if self.head_dim else 1) * self.state_dim
        weights = (self.heads if self.head_dim else self.heads * self.state_dim) + 2 * self.heads
        num_bytes = self.tokens * token * itemsize(self.q_dtype) + 4 * weights
        num_bytes += self.num_moved * state * itemsize(self.state_dtype)
        return Work(num_bytes, _SCAN_FLOPS * self.tokens * state)

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the inputs of every token, then of weights, by name."""
        of_head, of_group = (self.tokens, self.heads), (self.tokens, self.groups, self.state_dim)
        if not self.head_dim:
            of_group = (self.tokens, self.state_dim)  # type: ignore[assignment]
        return {
            "x": (*of_head, self.head_dim) if self.head_dim else of_head,
            "dt": of_head,
            "b": of_group,
            "c": of_group,
            "a": (self.heads,) if self.head_dim else (self.heads, self.state_dim),
            "d": (self.heads,),
            "dt_bias": (self.heads,),
        }

    def arguments(self, seed: int) -> Arguments:
        """rest: inputs and weights by name, step."""
        rng = np.random.default_rng(seed)
        states = random_array(rng, (self.pool_pages, *self.state_shape), self.state_dtype).at[0].set(0)
        dtypes = dict.fromkeys(("x", "dt", "b", "c"), self.q_dtype)
        inputs = {name: random_array(rng, shape, dtypes.get(name, "float32")) for name, shape in self._shapes.items()}
        return Arguments((states,), (inputs | {"a": -jnp.exp(inputs["a"])}, self.step_arrays(rng)))

    def inputs(self, rng: np.random.Generator) -> Arrays:
        """By name."""
        dtypes = dict.fromkeys(("x", "dt", "b", "c"), self.q_dtype)
        arrays = {name: random_values(rng, shape, dtypes.get(name, "float32")) for name, shape in self._shapes.items()}
        return arrays | {"a": -np.exp(arrays["a"])}

    def step(self, rng: np.random.Generator, q_lens: Sequence[int]) -> tuple[Arrays, Step]:
        """A random step of sequences with so many new tokens."""
        return self.make(rng, q_lens, ("x", "dt", "b", "c"))

    def hard_arguments(self, rng: np.random.Generator) -> Arguments:
        """Sequences that end beside the ends of chunks."""
        return hard_arguments(rng, *self.step(rng, hard_counts(rng, self.tokens, self.seqs, (4, 6, 16, 64, 128))))

    def call(self, backend: str, pages: tuple[Any, ...], rest: Any) -> Results:
        """Outputs and states."""
        inputs, step = rest
        if self.chunk:
            given = (Scan(**inputs), pages[0], StepArrays(*step).by_column())
            sizes = TritonSizes(self.chunk)
            out, states = xla_scan.selective_scan(*given, dt_limit=self.limit, by_triton=sizes)
            return Results(out, (states,))
        arrays = (inputs["x"], pages[0], *(inputs[name] for name in ("dt", "a", "b", "c")))
        weights = {name: inputs[name] for name in ("d", "dt_bias")}
        result = selective_scan(*arrays, *step, **weights, dt_limit=self.limit, backend=backend)
        return Results(result.out, (result.states,))

    def oracle(self, arrays: Arrays, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """(out, states)."""
        return (oracle.mamba2 if self.head_dim else oracle.mamba1)(arrays, self.limit, step)


CASES = (ConvCase, ScanCase)
