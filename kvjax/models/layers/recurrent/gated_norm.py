"""Root mean square norms with a gate, at the end of recurrent layers.

Flow:    x[..., size], gate[..., size] -> [GatedRMSNorm] -> [..., size]
Source:  Mamba-2 (arXiv 2405.21060, section 7): gate, then norm; Gated DeltaNet (arXiv 2412.06464): norm, then gate
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.models.layers.make import Make
from kvjax.models.layers.norm import rms_normed


class GatedRMSNorm(nnx.Module):
    """`x * act(gate)` normed, or normed `x` times `act(gate)`; each of `num_groups` parts of the axis by itself."""

    def __init__(
        self, size: int, *, eps: float, make: Make, gate_first: bool, num_groups: int = 1, activation: str = "silu"
    ) -> None:
        self.weight = make.ones(size)
        self.eps = eps
        self.gate_first = gate_first
        self.num_groups = num_groups
        self.activation = activation

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:  # [..., size] -> [..., size]
        """In the dtype of `x`, computed in float32."""
        act = jax.nn.silu if self.activation == "silu" else jax.nn.sigmoid
        x32, factor = x.astype(jnp.float32), act(gate.astype(jnp.float32))
        if self.gate_first:
            x32 = x32 * factor
        normed = rms_normed(x32.reshape(*x.shape[:-1], self.num_groups, -1), self.eps).reshape(x.shape)
        normed = normed * jnp.expand_dims(self.weight[...].astype(jnp.float32), range(x.ndim - 1))
        return (normed if self.gate_first else normed * factor).astype(x.dtype)
