"""Attention over one whole sequence, written from the definitions: what a model over StepCache must agree with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

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


def _complete(length: int, num_entries: int, ratio: int) -> jax.Array:  # bool[query, entry]
    """Whether all `ratio` tokens of an entry stand at or before the query."""
    return (jnp.arange(num_entries)[None] + 1) * ratio <= jnp.arange(length)[:, None] + 1


class DenseCache:
    """The methods of StepCache over a sequence that starts at position 0."""

    def __init__(
        self,
        shared_layers: dict[str, str] | None = None,
        overlapping: Collection[str] = (),  # layers of entries that are made of the tokens of the one before too
        stored: Callable[[str, jax.Array], jax.Array] = lambda layer_name, x: x,  # vectors as pages give them back
        learned: Mapping[str, tuple[np.ndarray, np.ndarray]] = MappingProxyType({}),  # K and V that all queries see
    ) -> None:
        self._owners = shared_layers or {}
        self._overlapping, self._stored, self._learned = overlapping, stored, learned
        self._entries: dict[str, tuple[int, jax.Array]] = {}  # tokens of an entry, entries
        self._written: dict[str, tuple[jax.Array, jax.Array]] = {}

    def __call__(
        self, layer_name: str, q: jax.Array, k: jax.Array | None, v: jax.Array | None, options: AttentionOptions
    ) -> jax.Array:
        """Softmax of q . k over the keys that a query sees, of values v."""
        k, v = self._own(layer_name, k, v)
        seen = visible(q.shape[0], options)
        if layer_name in self._learned:
            k, v = (jnp.concatenate(pair) for pair in zip(self._learned[layer_name], (k, v), strict=True))
            seen = jnp.pad(seen, ((0, 0), (k.shape[0] - seen.shape[1], 0)), constant_values=True)
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) * options.sm_scale
        if options.soft_cap is not None:
            scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
        weights = softmax(scores, seen, options.sinks)
        return jnp.einsum("hqk,khd->qhd", weights, v)

    def attend_latent(
        self,
        layer_name: str,
        q_nope: jax.Array,
        q_pe: jax.Array,
        latent: jax.Array | None,
        key_pe: jax.Array | None,
        options: AttentionOptions,
        picks: jax.Array | None = None,
    ) -> jax.Array:
        """All heads share one key [latent | rotated key], whose latent is the value; of picked tokens, if there are."""
        latent, key_pe = self._own(layer_name, latent, key_pe)
        key, q = jnp.concatenate([latent, key_pe], axis=-1), jnp.concatenate([q_nope, q_pe], axis=-1)
        if picks is None:
            return self("", q, key[:, None], latent[:, None], options)
        named = (picks[:, :, None] == jnp.arange(len(key))).any(axis=1)
        weights = softmax(jnp.einsum("qhd,kd->hqk", q, key) * options.sm_scale, named, None)
        return jnp.einsum("hqk,kd->qhd", weights, latent)

    def pick_tokens(self, layer_name: str, q: jax.Array, weights: jax.Array, keys: jax.Array, topk: int) -> jax.Array:
        """The tokens of the highest scores at or before the query."""
        keys = self._stored(layer_name, keys)
        scores = jnp.einsum("th,the->te", weights, jax.nn.relu(jnp.einsum("thd,ed->the", q, keys)))
        best, picked = jax.lax.top_k(jnp.where(jnp.tri(len(keys), dtype=bool), scores, -jnp.inf), min(topk, len(keys)))
        return jnp.where(best > -jnp.inf, picked, -1)

    def compress(
        self,
        layer_name: str,
        kv: jax.Array,
        scores: jax.Array,
        position_bias: jax.Array,
        finish: Callable[[jax.Array, jax.Array], jax.Array],
        *,
        states: str,
    ) -> None:
        """Entries of all full runs of tokens: means weighted by a softmax over the tokens, apart for each number.

        With overlap, told by the layer's name, an entry's first half of tokens are those of the entry before.
        """
        ratio, width = position_bias.shape
        kv, scores = (x.reshape(-1, ratio, width) for x in (kv, scores))
        scores = scores + position_bias
        if layer_name in self._overlapping:
            dim = width // 2
            before, own = (jnp.pad(x[:-1], ((1, 0), (0, 0), (0, 0))) for x in (kv, scores))
            hidden = jnp.arange(scores.shape[0])[:, None, None] == 0
            kv = jnp.concatenate([before[..., :dim], kv[..., dim:]], axis=1)
            own = jnp.where(hidden, -jnp.inf, own[..., :dim])
            scores = jnp.concatenate([own, scores[..., dim:]], axis=1)
        entries = jnp.sum(jax.nn.softmax(scores, axis=1) * kv, axis=1)
        entries = finish(entries, ratio * jnp.arange(entries.shape[0], dtype=jnp.int32))
        self._entries[layer_name] = (ratio, self._stored(layer_name, entries))

    def pick_entries(self, layer_name: str, q: jax.Array, weights: jax.Array, topk: int) -> jax.Array:
        """The entries of the highest scores among those whose tokens all stand at or before the query."""
        ratio, keys = self._entries[layer_name]
        scores = jnp.einsum("th,the->te", weights, jax.nn.relu(jnp.einsum("thd,ed->the", q, keys)))
        scores = jnp.where(_complete(q.shape[0], keys.shape[0], ratio), scores, -jnp.inf)
        best, picked = jax.lax.top_k(scores, min(topk, keys.shape[0]))
        return jnp.where(best > -jnp.inf, picked, -1)

    def attend_compressed(
        self,
        layer_name: str,
        q: jax.Array,
        kv: jax.Array,
        options: AttentionOptions,
        indices: jax.Array | None = None,
        *,
        compressed: str | None = None,
    ) -> jax.Array:
        """One softmax over the window's latents and the entries that a query may see, or has picked."""
        keys, seen = self._stored(layer_name, kv), visible(q.shape[0], options)
        if compressed is not None:
            ratio, entries = self._entries[compressed]
            named = _complete(q.shape[0], entries.shape[0], ratio)
            if indices is not None:
                named &= (indices[:, :, None] == jnp.arange(entries.shape[0])).any(axis=1)
            keys, seen = jnp.concatenate([keys, entries]), jnp.concatenate([seen, named], axis=1)
        weights = softmax(jnp.einsum("qhd,kd->hqk", q, keys) * options.sm_scale, seen, options.sinks)
        return jnp.einsum("hqk,kd->qhd", weights, keys)

    def _own(self, layer_name: str, first: jax.Array | None, second: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """What the layer writes, or another has written for it."""
        if first is None or second is None:
            return self._written[self._owners[layer_name]]
        self._written[layer_name] = (first, second)
        return first, second
