"""Checks of the arguments of gated_delta_rule; those that describe the step: `state_checks`."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import numpy as np

from pallas_kernels import checks
from pallas_kernels.gated_delta_rule.arguments import Options

OP = "gated_delta_rule"


def check_inputs(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, states: jax.Array, op: str = OP
) -> None:
    """Raises ValueError where inputs and states do not go together."""
    checks.check_array(op, "q", q, (None, None, None), "[num_tokens, key_heads, key_dim]")
    num_tokens, key_heads, key_dim = q.shape
    checks.check_array(op, "k", k, q.shape, "as q")
    checks.check_array(op, "v", v, (num_tokens, None, None), "[num_tokens, value_heads, value_dim]")
    heads, value_dim = v.shape[1:]
    if not q.size or not v.size:
        raise ValueError(f"{op}: expected at least one token, head and number, got q {q.shape} and v {v.shape}")
    if heads % key_heads:
        raise ValueError(f"{op}: expected key heads that divide {heads} value heads, got {key_heads}")
    if np.shape(g) not in ((num_tokens, heads), (num_tokens, heads, key_dim)):
        raise ValueError(
            f"{op}: expected g [num_tokens, value_heads] of shape ({num_tokens}, {heads}), or with a decay per number "
            f"of the key ({num_tokens}, {heads}, {key_dim}), got {np.shape(g)}"
        )
    checks.check_array(op, "beta", beta, (num_tokens, heads), "[num_tokens, value_heads]")
    shape = (None, heads, key_dim, value_dim)
    checks.check_array(op, "states", states, shape, "[pages, value_heads, key_dim, value_dim]")
    if not states.shape[0]:
        raise ValueError(f"{op}: expected at least the null page, got states {states.shape}")
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "states": states}
    for name, array in named.items():
        checks.check_floating(op, name, array)


def check_options(key_dim: int, scale: Any, use_qk_l2norm: Any, op: str = OP) -> Options:
    """The options; raises ValueError unless the scale is None or a finite number and the other True or False."""
    if scale is None:
        scale = key_dim**-0.5
    if not isinstance(scale, numbers.Real) or isinstance(scale, bool) or not math.isfinite(float(scale)):
        raise ValueError(f"{op}: expected scale to be None or a finite number, got {scale!r}")
    if not isinstance(use_qk_l2norm, bool):
        raise ValueError(f"{op}: expected use_qk_l2norm to be True or False, got {use_qk_l2norm!r}")
    return Options(float(scale), use_qk_l2norm)
