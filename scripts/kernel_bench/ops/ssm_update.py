"""selective_scan: a decode step and a prefill without a state before it, at the model shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.ssm_update import selective_scan
from pallas_kernels.ssm_update.shapes import SHAPES, SsmShape
from scripts.kernel_bench.case import Arguments, BenchCase, Sizes, Work, itemsize, random_array
from scripts.kernel_bench.shards import splits, with_most_shards
from scripts.kernel_bench.step import Rows, words

OP = "ssm_update"
_STATE_BYTES = 4
# Of a number of the state and a token: decay, input times b, their sum, times c, summed.
_FLOPS = 5


def cases(sizes: Sizes) -> Iterator[BenchCase]:
    """Every shape that splits so."""
    for shape in SHAPES:
        for kind in ("decode", "prefill") if splits(shape, sizes.shards) else ():
            yield case(kind, shape, sizes)


def case(kind: str, shape: SsmShape, sizes: Sizes) -> BenchCase:
    """One step of one shape."""
    if kind == "decode":
        rows: Rows = ((1, 1),) * (3 if sizes.small else sizes.batch or 64)
    else:
        length = 20 if sizes.small else sizes.context or 8192
        rows = ((length, length),)
    return BenchCase(
        OP,
        kind,
        shape.name,
        words(rows),
        sizes,
        work(kind, rows, shape, sizes),
        lambda seed: arguments(kind, rows, shape, sizes, seed),
        call,
        lambda: case(kind, shape, with_most_shards(shape, replace(sizes, small=True))),
        writes=True,
        has_tokens_in_pages=False,
    )


def work(kind: str, rows: Rows, shape: SsmShape, sizes: Sizes) -> Work:
    """x, dt, b, c and weights read, outputs written; each state written, and read where there is one (decode)."""
    heads, groups = shape.per_shard(sizes.shards)
    inner, num_tokens = heads * (shape.head_dim or 1), sum(q for q, _ in rows)
    state = inner * shape.state_dim
    token = 2 * inner + heads + 2 * (1 if shape.head_dim is None else groups) * shape.state_dim
    weights = (heads * shape.state_dim if shape.head_dim is None else heads) + 2 * heads
    num_bytes = num_tokens * token * itemsize(sizes.q_dtype) + 4 * weights
    num_bytes += len(rows) * state * _STATE_BYTES * (2 if kind == "decode" else 1)
    return Work(num_bytes, _FLOPS * num_tokens * state)


def arguments(kind: str, rows: Rows, shape: SsmShape, sizes: Sizes, seed: int) -> Arguments:
    """pages: the states; rest: x, (dt, a, b, c), (d, dt_bias), step."""
    rng = np.random.default_rng(seed)
    heads, groups = shape.per_shard(sizes.shards)
    num_tokens, num_seqs = sum(q for q, _ in rows), len(rows)
    x, a, b = (num_tokens, heads), (heads, shape.state_dim), (num_tokens, shape.state_dim)
    if shape.head_dim is not None:
        x, a, b = (*x, shape.head_dim), (heads,), (num_tokens, groups, shape.state_dim)
    states = random_array(rng, (1 + num_seqs, *shape.state_shapes(sizes.shards)[1]), "float32").at[0].set(0)
    inputs = [random_array(rng, size, sizes.q_dtype) for size in ((num_tokens, heads), b, b)]
    decay = -jnp.exp(random_array(rng, a, "float32"))
    per_head = tuple(random_array(rng, (heads,), "float32") for _ in range(2))
    starts = np.cumsum([0, *(q for q, _ in rows)])
    ends = (num_seqs if kind == "decode" else 0, num_seqs if kind == "decode" else 0, num_seqs)
    ids = jnp.asarray(1 + rng.permutation(num_seqs), jnp.int32)
    step = (
        jnp.asarray(starts, jnp.int32),
        jnp.asarray(ends, jnp.int32),
        ids,
        ids,
        jnp.full(num_seqs, kind == "decode"),
    )
    return Arguments((states,), (random_array(rng, x, sizes.q_dtype), (inputs[0], decay, *inputs[1:]), per_head, step))


def call(backend: str, pages: Any, rest: Any) -> tuple[Any, Any]:
    """Outputs and states."""
    x, weights, (d, dt_bias), step = rest
    result = selective_scan(x, pages[0], *weights, *step, d=d, dt_bias=dt_bias, backend=backend)
    return result.out, (result.states,)
