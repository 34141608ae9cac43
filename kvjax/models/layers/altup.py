"""Alternating updates: a layer computes one of several streams of hidden states and predicts the others.

Flow:    token's embedding [T, d] -> [split_streams] -> streams[P, T, d] -> [AltUp] around each layer -> [merge_streams]
Source:  arXiv 2301.13310; transformers' modeling_gemma3n.py, with whose outputs it agrees
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.models.configs.gemma3n import AltUpConfig
from kvjax.models.layers.linear import Linear
from kvjax.models.layers.make import Make

_LEAST_SQUARE = 1e-5  # of a stream that is brought to another's size


class AltUp(nnx.Module):
    """Maps between the streams of a token, by the token's active stream."""

    def __init__(self, size: int, config: AltUpConfig, *, eps: float, make: Make) -> None:
        streams = config.num_streams
        self.modality_router = make.linear(size, streams)
        self.router_norm = make.norm(size, eps=eps)
        self.prediction_coefs = make.linear(streams, streams**2)
        self.correction_coefs = make.linear(streams, streams)
        self.correct_output_scale = make.ones(size)
        self.size = size
        self.config = config

    def predict(self, streams: jax.Array) -> jax.Array:  # [P, T, d] -> [P, T, d]
        """What every stream is expected to be, the active one before the layer has computed it."""
        count = self.config.num_streams
        coefs = self.prediction_coefs(self._modalities(streams[self.config.active])).reshape(-1, count, count)
        return streams + jnp.einsum("itd,tji->jtd", streams, coefs)

    def correct(self, predictions: jax.Array, computed: jax.Array) -> jax.Array:  # [P, T, d], [T, d] -> [P, T, d]
        """Every stream, corrected by how far the active one is from what was expected."""
        coefs = self.correction_coefs(self._modalities(computed)) + 1
        return predictions + coefs.T[:, :, None] * (computed - predictions[self.config.active])[None]

    def output(self, streams: jax.Array) -> jax.Array:  # [P, T, d] -> [T, d]
        """The active stream, scaled if the config says so."""
        active = streams[self.config.active]
        return active * self.correct_output_scale[...][None] if self.config.scales_output else active

    def _modalities(self, hidden: jax.Array) -> jax.Array:  # [T, d] -> [T, P]
        routed = self.modality_router(self.router_norm(hidden) * jnp.asarray(1 / self.size, hidden.dtype))
        return jnp.tanh(routed.astype(jnp.float32)).astype(hidden.dtype)


def split_streams(embedded: jax.Array, projections: Sequence[Linear]) -> jax.Array:  # [T, d] -> [P, T, d]
    """The embedding and its projections, all of the embedding's size."""
    return jnp.stack([embedded, *(_of_size(project(embedded), embedded) for project in projections)])


def merge_streams(streams: jax.Array, projections: Sequence[Linear]) -> jax.Array:  # [P, T, d] -> [T, d]
    """The mean of the first stream and projections of the others, all of the first one's size."""
    others = (_of_size(project(x), streams[0]) for project, x in zip(projections, streams[1:], strict=True))
    return jnp.mean(jnp.stack([streams[0], *others]), axis=0)


def _of_size(x: jax.Array, like: jax.Array) -> jax.Array:  # [T, d], [T, d] -> [T, d]
    """`x` with the root mean square of `like`."""
    wanted = jnp.sqrt(jnp.mean(jnp.square(like), axis=-1, keepdims=True))
    present = jnp.sqrt(jnp.maximum(jnp.mean(jnp.square(x), axis=-1, keepdims=True), _LEAST_SQUARE))
    return x * wanted / present
