"""Checks of the arguments of causal_conv1d and selective_scan; those that describe the step: `state_checks`."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import numpy as np

from pallas_kernels import checks

CONV, SCAN = "causal_conv1d", "selective_scan"


def check_conv(x: jax.Array, states: jax.Array, weight: jax.Array, bias: Any, activation: Any) -> None:
    """Raises ValueError where inputs, states and weights do not go together."""
    checks.check_array(CONV, "x", x, (None, None), "[num_tokens, channels]")
    channels = x.shape[1]
    checks.check_array(CONV, "weight", weight, (channels, None), "[channels, taps]")
    if not x.size or weight.shape[1] < 2:
        raise ValueError(
            f"{CONV}: expected at least one token, one channel and two taps, got {x.shape}, {weight.shape}"
        )
    checks.check_array(CONV, "states", states, (None, channels, weight.shape[1] - 1), "[pages, channels, taps - 1]")
    named = {"x": x, "states": states, "weight": weight}
    if bias is not None:
        checks.check_array(CONV, "bias", bias, (channels,), "[channels]")
        named["bias"] = bias
    for name, array in named.items():
        checks.check_floating(CONV, name, array)
    if activation not in (None, "silu"):
        raise ValueError(f"{CONV}: expected activation 'silu' or None, got {activation!r}")


def check_scan(
    x: jax.Array,
    states: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    d: Any,
    dt_bias: Any,
    dt_limit: Any,
    op: str = SCAN,
) -> None:
    """Raises ValueError where the arguments are neither those of Mamba 1 nor those of Mamba 2."""
    if np.ndim(x) not in (2, 3):
        raise ValueError(
            f"{op}: expected x [num_tokens, channels] of Mamba 1 or [num_tokens, heads, head_dim] of Mamba 2, got "
            f"shape {np.shape(x)}"
        )
    num_tokens, num_heads = x.shape[:2]
    a_shape: tuple[int, ...]
    b_shape: tuple[int | None, ...]
    if x.ndim == 2:
        checks.check_array(op, "states", states, (None, num_heads, None), "[pages, channels, state_dim]")
        a_shape, a_axes = (num_heads, states.shape[-1]), "[channels, state_dim]"
        b_shape, b_axes = (num_tokens, states.shape[-1]), "[num_tokens, state_dim]"
    else:
        axes = "[pages, heads, head_dim, state_dim]"
        checks.check_array(op, "states", states, (None, num_heads, x.shape[2], None), axes)
        a_shape, a_axes = (num_heads,), "[heads]"
        groups = np.shape(b)[1] if np.ndim(b) == 3 else None
        b_shape, b_axes = (num_tokens, groups, states.shape[-1]), "[num_tokens, groups, state_dim]"
        if groups is not None and (groups < 1 or num_heads % groups):
            raise ValueError(f"{op}: expected groups that divide {num_heads} heads, got {groups}")
    if not x.size or not states.size:
        raise ValueError(f"{op}: expected at least one token, head, page and number, got {x.shape}, {states.shape}")
    checks.check_array(op, "dt", dt, (num_tokens, num_heads), "[num_tokens, heads]")
    checks.check_array(op, "a", a, a_shape, a_axes)
    checks.check_array(op, "b", b, b_shape, b_axes)
    checks.check_array(op, "c", c, b_shape, b_axes)
    named = {"x": x, "states": states, "dt": dt, "a": a, "b": b, "c": c}
    for name, array in {"d": d, "dt_bias": dt_bias}.items():
        if array is not None:
            checks.check_array(op, name, array, (num_heads,), "[heads]")
            named[name] = array
    for name, array in named.items():
        checks.check_floating(op, name, array)
    _check_limits(op, dt_limit)


def _check_limits(op: str, dt_limit: Any) -> None:
    pair = isinstance(dt_limit, tuple | list) and len(dt_limit) == 2
    if not pair or not all(isinstance(x, numbers.Real) for x in dt_limit) or not 0 <= dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"{op}: expected dt_limit to be a pair 0 <= least <= most, got {dt_limit!r}")
