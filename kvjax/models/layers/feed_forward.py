"""The gated feed-forward part of a layer.

Flow:    hidden[T, d] -> [FeedForward] -> hidden[T, d]
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from flax import nnx

from kvjax.models.layers.make import Make

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class FeedForward(nnx.Module):
    """`down(act(gate(x)) * up(x))`."""

    def __init__(self, size: int, inner: int, *, activation: str, make: Make, bias: bool = False) -> None:
        self.gate_proj = make.columns(size, inner, bias=bias)
        self.up_proj = make.columns(size, inner, bias=bias)
        self.down_proj = make.rows(inner, size, bias=bias)
        self.activation = activation

    def __call__(self, hidden: jax.Array) -> jax.Array:  # [T, d] -> [T, d]
        """The part's output, without residual."""
        gate = ACTIVATIONS[self.activation](self.gate_proj(hidden))
        return self.down_proj(gate * self.up_proj(hidden))
