"""selective_scan of ssm_update: steps of decoding, of drafts, and a prefill from nothing, at the model shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases.case import Arguments, Work, itemsize
from pallas_kernels.cases.numbers import random_array
from pallas_kernels.ssm_update import selective_scan
from pallas_kernels.ssm_update.shapes import SHAPES, SsmShape
from scripts.kernel_bench.case import BenchCase, Sizes
from scripts.kernel_bench.recurrent import StateStep, case_of, cases_of

OP = "ssm_update"
_STATE_BYTES = 4
# Of a number of the state and a token: decay, input times b, their sum, times c, summed.
_FLOPS = 5


def cases(sizes: Sizes) -> Iterator[BenchCase]:
    """Every shape that splits so."""
    return cases_of(SHAPES, sizes, case)


def case(kind: str, shape: SsmShape, sizes: Sizes) -> BenchCase:
    """One step of one shape."""
    return case_of(OP, kind, shape, sizes, work=work, arguments=arguments, call=call, case=case)


def work(step: StateStep, shape: SsmShape, sizes: Sizes) -> Work:
    """x, dt, b, c and weights read, outputs written; each state written, and one read by each sequence that has it."""
    heads, groups = shape.per_shard(sizes.shards)
    inner = heads * (shape.head_dim or 1)
    state = inner * shape.state_dim
    token = 2 * inner + heads + 2 * (1 if shape.head_dim is None else groups) * shape.state_dim
    weights = (heads * shape.state_dim if shape.head_dim is None else heads) + 2 * heads
    num_bytes = step.num_tokens * token * itemsize(sizes.q_dtype) + 4 * weights
    num_bytes += step.num_moved * state * _STATE_BYTES
    return Work(num_bytes, _FLOPS * step.num_tokens * state)


def arguments(step: StateStep, shape: SsmShape, sizes: Sizes, seed: int) -> Arguments:
    """pages: the states; rest: x, (dt, a, b, c), (d, dt_bias), step."""
    rng = np.random.default_rng(seed)
    heads, groups = shape.per_shard(sizes.shards)
    x, a, b = (step.num_tokens, heads), (heads, shape.state_dim), (step.num_tokens, shape.state_dim)
    if shape.head_dim is not None:
        x, a, b = (*x, shape.head_dim), (heads,), (step.num_tokens, groups, shape.state_dim)
    states = random_array(rng, (1 + step.num_written, *shape.state_shapes(sizes.shards)[1]), "float32").at[0].set(0)
    inputs = [random_array(rng, size, sizes.q_dtype) for size in ((step.num_tokens, heads), b, b)]
    decay = -jnp.exp(random_array(rng, a, "float32"))
    per_head = tuple(random_array(rng, (heads,), "float32") for _ in range(2))
    weights = (inputs[0], decay, *inputs[1:])
    return Arguments((states,), (random_array(rng, x, sizes.q_dtype), weights, per_head, step.arrays(rng)))


def call(backend: str, pages: Any, rest: Any) -> tuple[Any, Any]:
    """Outputs and states."""
    x, weights, (d, dt_bias), step = rest
    result = selective_scan(x, pages[0], *weights, *step, d=d, dt_bias=dt_bias, backend=backend)
    return result.out, (result.states,)
