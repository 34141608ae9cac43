"""The op on hard steps of attention by the reference, next to the oracle; what tests of any attention share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention_output import AttentionOutput
from pallas_kernels.cases import steps
from pallas_kernels.cases.compare import TOLERANCE
from pallas_kernels.cases.numbers import random_values
from pallas_kernels.mask import MaskRule
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.hard_steps import Case, Shape, make_case
from pallas_kernels.ragged_paged_attention.oracle import Options

__all__ = ["Case", "Shape", "make_case", "random_values"]


def random_rows(rng: np.random.Generator, shape: Shape) -> list[tuple[int, int]]:
    """Rows that fit the shape."""
    return steps.random_rows(rng, shape.num_tokens, shape.num_rows, shape.num_columns * shape.page_size)


def run(case: Case, options: Options, **extra: Any) -> AttentionOutput:
    """The op on `case`, jitted: one compilation per static shape and options."""
    static = {
        "sm_scale": options.sm_scale,
        "causal": options.causal,
        "sliding_window": options.sliding_window,
        "attention_chunk_size": options.attention_chunk_size,
        "num_sink_tokens": options.num_sink_tokens,
        "soft_cap": options.soft_cap,
        "num_kv_heads": case.shape.num_kv_heads,
    }
    per_head = {"sinks": options.sinks, "k_scale": options.k_scale, "v_scale": options.v_scale}
    given = {name: jnp.asarray(x, jnp.float32) for name, x in per_head.items() if x is not None}
    return _jitted(tuple(static.items()))(*case.arrays, **given, **extra)


@functools.cache
def _jitted(static: tuple[tuple[str, Any], ...]) -> Callable[..., AttentionOutput]:
    return jax.jit(functools.partial(ragged_paged_attention, return_lse=True, backend="reference", **dict(static)))


def assert_matches_oracle(case: Case, options: Options) -> AttentionOutput:
    """Runs the op on `case`; out and lse are the oracle's. Gives back the result."""
    result = run(case, options)
    out, lse = case.expected(options)
    assert_close(result.out, out, case.shape.q_dtype, "out")
    assert_close(result.lse, lse, "float32", "lse")
    assert result.out.dtype == jnp.dtype(case.shape.q_dtype)
    return result


def static_of(options: Options) -> dict[str, Any]:
    """Keyword arguments of a kernel, but for its own."""
    given = {name: getattr(options, name) for name in ("sinks", "k_scale")}
    return {
        "mask": MaskRule(options.causal, options.sliding_window, options.attention_chunk_size, options.num_sink_tokens),
        "sm_scale": options.sm_scale,
        "soft_cap": options.soft_cap,
        **{name: None if x is None else jnp.asarray(x, jnp.float32) for name, x in given.items()},
    }


def nan_behind(case: Any) -> Any:
    """A case of any attention with NaN as queries of the tokens of no sequence."""
    q = case.q.copy()
    q[case.query_start_loc[case.distribution[2]] :] = np.nan
    return dataclasses.replace(case, q=q)


def assert_close(got: np.ndarray, expected: np.ndarray, dtype: str, what: str) -> None:
    """Within `TOLERANCE[dtype]` of the largest finite value (of 1 at least); infinities and NaN equal."""
    got, expected = (np.asarray(values).astype(np.float64) for values in (got, expected))
    scale = max(1.0, float(np.abs(expected[np.isfinite(expected)]).max(initial=0.0)))
    limit = TOLERANCE[dtype] * scale
    chex.assert_trees_all_close({what: got}, {what: expected}, rtol=0, atol=limit, strict=True)


def assert_right(
    result: Sequence[np.ndarray], expected: Sequence[np.ndarray], q_dtype: str, lse_dtype: str = "float32"
) -> None:
    """(out, lse) as `assert_close`, head by head: a huge sink of one would hide what is wrong in others."""
    for head in range(expected[0].shape[1]):
        assert_close(result[0][:, head], expected[0][:, head], q_dtype, f"out of head {head}")
        assert_close(result[1][:, head], expected[1][:, head], lse_dtype, f"lse of head {head}")


def as_bytes(tree: Any) -> Any:
    """The arrays of a tree as bytes, which are equal only where every bit is, NaN and signed zeros included."""
    return jax.tree.map(lambda leaf: np.asarray(leaf).view(np.uint8), tree)
