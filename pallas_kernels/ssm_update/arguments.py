"""Arguments of the ops after their checks, as the implementations take them.

Flow:    api -> [Convolution], [Scan] -> reference, kernels

Axis names as in api.
"""

from __future__ import annotations

from typing import NamedTuple

import jax


class Convolution(NamedTuple):
    """Inputs and weights of causal_conv1d."""

    x: jax.Array  # [T, C]
    weight: jax.Array  # [C, W]
    bias: jax.Array | None  # [C]


class Scan(NamedTuple):
    """Inputs and weights of selective_scan."""

    x: jax.Array  # [T, H] or [T, H, P]
    dt: jax.Array  # [T, H]
    a: jax.Array  # [H, N] or [H]
    b: jax.Array  # [T, N] or [T, G, N]
    c: jax.Array
    d: jax.Array | None  # [H]
    dt_bias: jax.Array | None  # [H]
