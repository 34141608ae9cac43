"""The op on hard steps of latent attention, by the reference, next to the oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention_output import AttentionOutput
from pallas_kernels.mla_paged_attention import mla_paged_attention
from pallas_kernels.mla_paged_attention.hard_steps import Case, Shape, make_case
from pallas_kernels.ragged_paged_attention.oracle import Options
from tests.pallas_kernels import cases

__all__ = ["Case", "Shape", "assert_matches_oracle", "make_case", "run"]


def run(case: Case, options: Options, **extra: Any) -> AttentionOutput:
    """The op on `case`, jitted: one compilation per static shape and options."""
    static = {
        "sm_scale": options.sm_scale,
        "causal": options.causal,
        "sliding_window": options.sliding_window,
        "attention_chunk_size": options.attention_chunk_size,
        "num_sink_tokens": options.num_sink_tokens,
        "soft_cap": options.soft_cap,
        "page_size": case.shape.latent.page_size,
    }
    given = {"sinks": options.sinks, "k_scale": options.k_scale}
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in given.items() if x is not None}
    return _jitted(tuple(static.items()))(*case.arrays, **arrays, **extra)


@functools.cache
def _jitted(static: tuple[tuple[str, Any], ...]) -> Callable[..., AttentionOutput]:
    return jax.jit(functools.partial(mla_paged_attention, return_lse=True, backend="reference", **dict(static)))


def assert_matches_oracle(case: Case, options: Options) -> AttentionOutput:
    """Runs the op on `case`; out and lse are the oracle's. Gives back the result."""
    result = run(case, options)
    out, lse = case.expected(options)
    cases.assert_close(result.out, out, case.shape.q_dtype, "out")
    cases.assert_close(result.lse, lse, "float32", "lse")
    assert result.out.dtype == jnp.dtype(case.shape.q_dtype)
    return result
