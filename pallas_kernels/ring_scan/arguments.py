"""Arguments of ring_scan after their checks, as the implementations take them.

Flow:    api -> [ScanRing], [Options] -> reference, kernels

Axis names as in api.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.ssm_update.arguments import Scan


class ScanRing(NamedTuple):
    """What the tokens after the base states add to them: `dt_j x_j b_j^T`, and by `dt_j` their decays.

    The numbers of a token fill a slot in order; what is left of it is padding. See `slots`.
    """

    xs: jax.Array  # [pages, R, *slot] H * P numbers of a token, in the dtype of x
    dts: jax.Array  # float32[pages, R, *slot] H time steps, after softplus and limits
    bs: jax.Array  # [pages, R, *slot] G * N numbers, in the dtype of b


class Options(NamedTuple):
    """What is known when the call is traced."""

    dt_limit: tuple[float, float]
    max_new_tokens: int


__all__ = ["Options", "Scan", "ScanRing"]
