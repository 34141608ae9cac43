"""Checks of the arguments of ring_delta_rule; those that describe the step: `ring_checks`."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels import checks
from pallas_kernels.gated_delta_rule.validate import check_inputs as check_rule_inputs
from pallas_kernels.gated_delta_rule.validate import check_options as check_rule_options
from pallas_kernels.ring_checks import check_ring
from pallas_kernels.ring_delta_rule.arguments import DeltaRing, Inputs, Options

OP = "ring_delta_rule"


def check_inputs(inputs: Inputs, states: jax.Array, ring: DeltaRing) -> int:
    """Slots of the ring; raises ValueError where inputs, states and ring do not go together."""
    check_rule_inputs(*inputs, states, op=OP)
    if not isinstance(ring, DeltaRing):
        raise ValueError(f"{OP}: expected ring to be a DeltaRing(keys, deltas, decays), got {type(ring).__name__}")
    k, v, g = inputs.k, inputs.v, inputs.g
    decay_axes = "value_heads" if g.ndim == 2 else "value_heads, key_dim"
    num_slots = check_ring(
        OP,
        states.shape[0],
        {
            "keys": (ring.keys, k.shape[1:], "key_heads, key_dim"),
            "deltas": (ring.deltas, v.shape[1:], "value_heads, value_dim"),
            "decays": (ring.decays, g.shape[1:], decay_axes),
        },
    )
    if checks.dtype_of(ring.keys) != k.dtype:
        raise ValueError(
            f"{OP}: expected ring.keys in the dtype of k, {k.dtype}, got {checks.dtype_of(ring.keys)}; keys are "
            "kept as they are given"
        )
    return num_slots


def check_options(key_dim: int, scale: Any, use_qk_l2norm: Any, max_new_tokens: Any) -> Options:
    """The options; raises ValueError for those that are none, see `gated_delta_rule`."""
    rule = check_rule_options(key_dim, scale, use_qk_l2norm, op=OP)
    checks.check_at_least(OP, "max_new_tokens", max_new_tokens, 1)
    return Options(rule, int(max_new_tokens))
