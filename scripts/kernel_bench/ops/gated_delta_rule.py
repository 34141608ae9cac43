"""gated_delta_rule: steps of decoding, of drafts, and a prefill from nothing, at the model shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases.case import Arguments, Work, itemsize
from pallas_kernels.cases.numbers import random_array
from pallas_kernels.gated_delta_rule import gated_delta_rule
from pallas_kernels.gated_delta_rule.shapes import SHAPES, DeltaShape
from scripts.kernel_bench.case import BenchCase, Sizes
from scripts.kernel_bench.recurrent import StateStep, case_of, cases_of

OP = "gated_delta_rule"
_STATE_BYTES = _GATE_BYTES = 4
# Of a number of the state and a token: decay; times k, summed; k times delta, added; times q, summed.
_FLOPS = 7


def cases(sizes: Sizes) -> Iterator[BenchCase]:
    """Every shape that splits so."""
    return cases_of(SHAPES, sizes, case)


def case(kind: str, shape: DeltaShape, sizes: Sizes) -> BenchCase:
    """One step of one shape."""
    return case_of(OP, kind, shape, sizes, work=work, arguments=arguments, call=call, case=case)


def work(step: StateStep, shape: DeltaShape, sizes: Sizes) -> Work:
    """q, k, v, g and beta read, outputs written; each state written, and one read by each sequence that has it."""
    key_heads, heads = shape.per_shard(sizes.shards)
    numbers = 2 * key_heads * shape.key_dim + 2 * heads * shape.value_dim
    gates = heads * (1 + (shape.key_dim if shape.is_per_channel else 1))
    state = heads * shape.key_dim * shape.value_dim
    num_bytes = step.num_tokens * (numbers * itemsize(sizes.q_dtype) + gates * _GATE_BYTES)
    return Work(num_bytes + step.num_moved * state * _STATE_BYTES, _FLOPS * step.num_tokens * state)


def arguments(step: StateStep, shape: DeltaShape, sizes: Sizes, seed: int) -> Arguments:
    """pages: the states; rest: q, k, v, g, beta, step."""
    rng = np.random.default_rng(seed)
    key_heads, heads = shape.per_shard(sizes.shards)
    of_key, of_head = (step.num_tokens, key_heads, shape.key_dim), (step.num_tokens, heads)
    states = random_array(rng, (1 + step.num_written, *shape.state_shapes(sizes.shards)[1]), "float32").at[0].set(0)
    q, k, v = (random_array(rng, size, sizes.q_dtype) for size in (of_key, of_key, (*of_head, shape.value_dim)))
    g = -jnp.exp(random_array(rng, (*of_head, shape.key_dim) if shape.is_per_channel else of_head, "float32"))
    beta = jax.nn.sigmoid(random_array(rng, of_head, "float32"))
    return Arguments((states,), (q, k, v, g, beta, step.arrays(rng)))


def call(backend: str, pages: Any, rest: Any) -> tuple[Any, Any]:
    """Outputs and states."""
    *inputs, step = rest
    result = gated_delta_rule(*inputs, pages[0], *step, use_qk_l2norm=True, backend=backend)
    return result.out, (result.states,)
