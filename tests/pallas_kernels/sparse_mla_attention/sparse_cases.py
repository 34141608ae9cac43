"""The op on hard steps of sparse latent attention, by the reference, next to the oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention_output import AttentionOutput
from pallas_kernels.sparse_mla_attention import sparse_mla_attention
from pallas_kernels.sparse_mla_attention.hard_steps import Case, Shape, make_case
from tests.pallas_kernels import cases

__all__ = ["Case", "Shape", "assert_matches_oracle", "make_case", "run"]


def run(case: Case, sinks: np.ndarray | None, **extra: Any) -> AttentionOutput:
    """The op on `case`, jitted: one compilation per static shape."""
    arrays = jax.tree.map(jnp.asarray, case.compressed)
    if sinks is not None:
        extra["sinks"] = jnp.asarray(sinks, jnp.float32)
    return _jitted(case.shape)(jnp.asarray(case.q), (jnp.asarray(case.page),), *case.step, **arrays, **extra)


@functools.cache
def _jitted(shape: Shape) -> Callable[..., AttentionOutput]:
    static = {
        "sm_scale": shape.sm_scale,
        "sliding_window": shape.window,
        "tokens_per_state": shape.ratio,
        "entries": shape.entries,
        "page_size": shape.latent.page_size,
        "compressed_page_size": shape.entry_page_size,
        "return_lse": True,
        "backend": "reference",
    }
    return jax.jit(functools.partial(sparse_mla_attention, **static))


def assert_matches_oracle(case: Case, sinks: np.ndarray | None) -> None:
    """Runs the op on `case`; out and lse are the oracle's."""
    result = run(case, sinks)
    out, lse = case.expected(sinks)
    cases.assert_close(result.out, out, case.shape.q_dtype, "out")
    cases.assert_close(result.lse, lse, "float32", "lse")
    assert result.out.dtype == jnp.dtype(case.shape.q_dtype)
