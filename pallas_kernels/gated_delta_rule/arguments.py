"""Arguments of gated_delta_rule after their checks, as the implementations take them.

Flow:    api -> [Inputs], [Options] -> reference, kernels

Axis names as in api.
"""

from __future__ import annotations

from typing import NamedTuple

import jax


class Inputs(NamedTuple):
    """What the new tokens bring."""

    q: jax.Array  # [T, G, K]
    k: jax.Array  # [T, G, K]
    v: jax.Array  # [T, H, V]
    g: jax.Array  # [T, H] or [T, H, K]
    beta: jax.Array  # [T, H]


class Options(NamedTuple):
    """What is known when the call is traced."""

    scale: float
    use_qk_l2norm: bool
