"""The feed-forward part of a layer, gated or not.

Flow:    hidden[T, d] -> [FeedForward, PlainFeedForward] -> hidden[T, d]
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.models.layers.make import Make

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def gated(gate: jax.Array, up: jax.Array, activation: str, limit: float | None = None) -> jax.Array:
    """`act(gate) * up`; `limit` bounds the gate above, and `up` on both sides."""
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return ACTIVATIONS[activation](gate) * up


class FeedForward(nnx.Module):
    """`down(act(gate(x)) * up(x))`."""

    def __init__(
        self, size: int, inner: int, *, activation: str, make: Make, bias: bool = False, limit: float | None = None
    ) -> None:
        self.gate_proj = make.columns(size, inner, bias=bias)
        self.up_proj = make.columns(size, inner, bias=bias)
        self.down_proj = make.rows(inner, size, bias=bias)
        self.activation = activation
        self.limit = limit

    def __call__(self, hidden: jax.Array) -> jax.Array:  # [T, d] -> [T, d]
        """The part's output, without residual."""
        return self.down_proj(gated(self.gate_proj(hidden), self.up_proj(hidden), self.activation, self.limit))


class PlainFeedForward(nnx.Module):
    """`down(act(up(x)))`."""

    def __init__(self, size: int, inner: int, *, activation: str, make: Make, bias: bool = False) -> None:
        self.up_proj = make.columns(size, inner, bias=bias)
        self.down_proj = make.rows(inner, size, bias=bias)
        self.activation = activation

    def __call__(self, hidden: jax.Array) -> jax.Array:  # [T, d] -> [T, d]
        """The part's output, without residual."""
        return self.down_proj(ACTIVATIONS[self.activation](self.up_proj(hidden)))
