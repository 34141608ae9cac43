"""Checks of the arguments of ring_scan; those that describe the step: `ring_checks`."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import checks
from pallas_kernels.ring_checks import check_ring
from pallas_kernels.ring_scan.arguments import Scan, ScanRing
from pallas_kernels.ssm_update.validate import check_scan

OP = "ring_scan"


def check_inputs(inputs: Scan, states: jax.Array, ring: ScanRing, dt_limit: Any) -> int:
    """Slots of the ring; raises ValueError where inputs, states and ring do not go together.

    Raises:
        NotImplementedError: they are of Mamba 1.
    """
    x, dt, a, b, c, d, dt_bias = inputs
    if np.ndim(x) == 2:
        raise NotImplementedError(
            f"{OP}: a channel of Mamba 1 has a state of few numbers, of which a ring saves little; use selective_scan"
        )
    check_scan(x, states, dt, a, b, c, d, dt_bias, dt_limit, op=OP)
    if not isinstance(ring, ScanRing):
        raise ValueError(f"{OP}: expected ring to be a ScanRing(xs, dts, bs), got {type(ring).__name__}")
    counts = {"xs": ("heads * head_dim", x), "dts": ("heads", dt), "bs": ("groups * state_dim", b)}
    for (name, (axes, of_tokens)), array in zip(counts.items(), ring, strict=True):
        count = math.prod(of_tokens.shape[1:])
        if len(array.shape) < 3 or math.prod(array.shape[2:]) < count:
            raise ValueError(
                f"{OP}: expected ring.{name} [pages, slots, ...] of slots with room for {axes}, {count} numbers, got "
                f"shape {tuple(array.shape)}"
            )
    named = zip(counts, ring, strict=True)
    num_slots = check_ring(OP, states.shape[0], {name: (y, tuple(y.shape[2:]), "...") for name, y in named})
    for name, array, dtype in (("xs", ring.xs, x.dtype), ("dts", ring.dts, jnp.float32), ("bs", ring.bs, b.dtype)):
        if checks.dtype_of(array) != dtype:
            raise ValueError(
                f"{OP}: expected ring.{name} of dtype {jnp.dtype(dtype)}, got {checks.dtype_of(array)}; x and b are "
                "kept as they are given, time steps in float32"
            )
    return num_slots
