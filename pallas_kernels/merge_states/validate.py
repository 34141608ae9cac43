"""Checks of merge_states' arguments; all are static."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import checks

OP = "merge_states"


def stacked(name: str, parts: jax.Array | Sequence[jax.Array]) -> jax.Array:
    """The parts as one array.

    Raises:
        ValueError: there is none, or they differ in shape or dtype.
    """
    if not isinstance(parts, tuple | list):
        return jnp.asarray(parts)
    kinds = [(np.shape(part), jnp.result_type(part).name) for part in parts]
    if not kinds:
        raise ValueError(f"{OP}: expected at least one part, got no {name}")
    if len(set(kinds)) > 1:
        raise ValueError(f"{OP}: expected {name} of one shape and dtype, got {kinds}")
    return jnp.stack(parts)


def check(outs: jax.Array, lses: jax.Array, sinks: Any) -> None:
    """Raises ValueError unless there is a part, and every part has an out and an LSE of the same rows."""
    checks.check_array(OP, "outs", outs, [None] * 4, "[num_parts, num_tokens, num_q_heads, head_dim_v]")
    checks.check_floating(OP, "outs", outs)
    if not outs.shape[0]:
        raise ValueError(f"{OP}: expected at least one part, got outs of shape {outs.shape}")
    checks.check_array(OP, "lses", lses, outs.shape[:3], "[num_parts, num_tokens, num_q_heads] as outs")
    if lses.dtype != jnp.float32:
        raise ValueError(f"{OP}: expected lses of dtype float32, got {lses.dtype}")
    if sinks is not None:
        checks.check_array(OP, "sinks", sinks, (outs.shape[2],), "[num_q_heads]")
        checks.check_floating(OP, "sinks", sinks)
