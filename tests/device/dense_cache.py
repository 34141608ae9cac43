"""Attention over one whole sequence, written from the definitions: what a model over PagedKVCache must agree with."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.device import AttentionOptions


def visible(length: int, options: AttentionOptions) -> jax.Array:  # bool[query, key]
    """Who sees whom: no later token; of earlier ones the window's, the chunk's, and the first ones."""
    query, key = jnp.arange(length)[:, None], jnp.arange(length)[None, :]
    seen = jnp.ones((length, length), bool)
    if options.sliding_window is not None:
        seen &= query - key < options.sliding_window
    if options.attention_chunk_size is not None:
        seen &= query // options.attention_chunk_size == key // options.attention_chunk_size
    return (key <= query) & (seen | (key < options.num_sink_tokens))


def softmax(scores: jax.Array, seen: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Weights [..., key] of scores [heads, query, key], a sink of each head beside them."""
    scores = jnp.where(seen, scores, -jnp.inf)
    if sinks is not None:
        extra = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        scores = jnp.concatenate([scores, extra], axis=-1)
    return jax.nn.softmax(scores, axis=-1)[..., : seen.shape[-1]]


class DenseCache:
    """The methods of PagedKVCache over a sequence that starts at position 0."""

    def __init__(self, shared_layers: dict[str, str] | None = None) -> None:
        self._owners = shared_layers or {}
        self._written: dict[str, tuple[jax.Array, jax.Array]] = {}

    def __call__(
        self, layer_name: str, q: jax.Array, k: jax.Array | None, v: jax.Array | None, options: AttentionOptions
    ) -> jax.Array:
        """Softmax of q . k over the keys that a query sees, of values v."""
        k, v = self._own(layer_name, k, v)
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) * options.sm_scale
        if options.soft_cap is not None:
            scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
        weights = softmax(scores, visible(q.shape[0], options), options.sinks)
        return jnp.einsum("hqk,khd->qhd", weights, v)

    def attend_latent(
        self,
        layer_name: str,
        q_nope: jax.Array,
        q_pe: jax.Array,
        latent: jax.Array | None,
        key_pe: jax.Array | None,
        options: AttentionOptions,
    ) -> jax.Array:
        """All heads share one key [latent | rotated key], whose latent is the value."""
        latent, key_pe = self._own(layer_name, latent, key_pe)
        key, value = jnp.concatenate([latent, key_pe], axis=-1)[:, None], latent[:, None]
        return self("", jnp.concatenate([q_nope, q_pe], axis=-1), key, value, options)

    def _own(self, layer_name: str, first: jax.Array | None, second: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """What the layer writes, or another has written for it."""
        if first is None or second is None:
            return self._written[self._owners[layer_name]]
        self._written[layer_name] = (first, second)
        return first, second
