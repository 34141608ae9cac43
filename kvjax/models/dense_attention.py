"""Attention over one whole sequence, for training and tests; nothing is cached.

Flow:    Decoder's q, k, v of a sequence -> [DenseAttention] -> attention outputs

A sliding layer attends window by window, each to its own and the previous one, so it costs T * 2 * window, not T * T; a
chunked one attends chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from kvjax.device.layers.attention_options import AttentionOptions


class DenseAttention:
    """Causal attention of tokens 0 .. T-1 of one sequence; `jax.vmap` over the decoder makes batches.

    Made for one trace of a model with `shared_layers` (layer without K and V -> the layer whose it reads); without them
    one may serve any number.
    """

    def __init__(self, shared_layers: Mapping[str, str] | None = None) -> None:
        self._owners = dict(shared_layers or {})
        self._kept: dict[str, tuple[jax.Array, jax.Array]] = {}  # K and V of the layers that others read

    def __call__(
        self,
        layer_name: str,
        q: jax.Array,  # [T, Hq, D]
        k: jax.Array | None,  # [T, Hkv, D]; None: the layer reads another's
        v: jax.Array | None,  # [T, Hkv, D]
        options: AttentionOptions,
    ) -> jax.Array:  # [T, Hq, D]
        """Outputs in the dtype of `q`, accumulated in float32.

        Raises:
            NotImplementedError: the options have scales of quantised pages.
            ValueError: K and V are missing, and not those of a layer that ran before.
        """
        _check_options(layer_name, options)
        k, v = self._keys_and_values(layer_name, k, v)
        num_tokens = q.shape[0]
        width = _chunk_width(options)
        if width is None or width >= num_tokens:
            positions = jnp.arange(num_tokens)[None]
            return _attend_chunks(q[None], k[None], v[None], positions, positions, options)[0]
        chunks = -(-num_tokens // width)
        padding = ((0, chunks * width - num_tokens), (0, 0), (0, 0))
        positions = jnp.arange(chunks * width).reshape(chunks, width)
        q, k, v = (jnp.pad(x, padding).reshape(chunks, width, *x.shape[1:]) for x in (q, k, v))
        key_positions = positions
        if options.sliding_window is not None:
            key_positions = jnp.concatenate([positions - width, positions], axis=1)
            k, v = _with_previous(k), _with_previous(v)
        out = _attend_chunks(q, k, v, positions, key_positions, options)
        return out.reshape(-1, *out.shape[2:])[:num_tokens]

    def _keys_and_values(
        self, layer_name: str, k: jax.Array | None, v: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """K and V of the layer, or of the layer that it shares them with."""
        if k is None or v is None:
            owner = self._owners.get(layer_name)
            if owner is None or owner not in self._kept:
                raise ValueError(
                    f"{layer_name}: expected K and V, got none; only those of shared_layers whose owner ran have none"
                )
            return self._kept[owner]
        if layer_name in self._owners.values():
            self._kept[layer_name] = (k, v)
        return k, v


def _check_options(layer_name: str, options: AttentionOptions) -> None:
    """Raises NotImplementedError for options that only serving has."""
    names = ", ".join(name for name in ("k_scale", "v_scale") if getattr(options, name) is not None)
    if names:
        raise NotImplementedError(f"{layer_name}: expected dense attention without scales of pages, got {names}")
    if options.sees_prompt:
        raise NotImplementedError(
            f"{layer_name}: expected sees_prompt=False of dense attention, which knows no prompts"
        )


def _chunk_width(options: AttentionOptions) -> int | None:
    """Tokens whose queries find all their keys among themselves, with a window also in as many before; None: all."""
    if options.num_sink_tokens or (options.sliding_window and options.attention_chunk_size):
        return None
    return options.sliding_window or options.attention_chunk_size


def _with_previous(x: jax.Array) -> jax.Array:  # [C, W, H, D] -> [C, 2 * W, H, D]
    """Each chunk behind the one before it; the first behind zeros."""
    return jnp.concatenate([jnp.pad(x[:-1], ((1, 0), (0, 0), (0, 0), (0, 0))), x], axis=1)


def _visible(
    q_pos: jax.Array,  # int32[C, W, 1]
    k_pos: jax.Array,  # int32[C, 1, K], negative: no key
    options: AttentionOptions,
) -> jax.Array:  # bool[C, W, K]
    """Which keys each query sees: what `AttentionOptions` says."""
    seen = jnp.ones_like(k_pos, jnp.bool_)
    if options.sliding_window is not None:
        seen = seen & (q_pos - k_pos < options.sliding_window)
    if options.attention_chunk_size is not None:
        seen = seen & (q_pos // options.attention_chunk_size == k_pos // options.attention_chunk_size)
    return (seen | (k_pos < options.num_sink_tokens)) & (k_pos >= 0) & (k_pos <= q_pos)


def _attend_chunks(
    q: jax.Array,  # [C, W, Hq, D]
    k: jax.Array,  # [C, K, Hkv, D]
    v: jax.Array,  # [C, K, Hkv, D]
    q_pos: jax.Array,  # int32[C, W]
    k_pos: jax.Array,  # int32[C, K], negative: no key
    options: AttentionOptions,
) -> jax.Array:  # [C, W, Hq, D]
    """Every chunk's queries over its keys."""
    chunks, width, num_q_heads, head_dim = q.shape
    grouped = q.reshape(chunks, width, k.shape[2], -1, head_dim)
    scores = jnp.einsum("cqhgd,ckhd->chgqk", grouped, k, preferred_element_type=jnp.float32) * options.sm_scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    visible = _visible(q_pos[:, :, None], k_pos[:, None, :], options)
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    if options.sinks is not None:
        sinks = options.sinks.astype(jnp.float32).reshape(1, *scores.shape[1:3], 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]]
    out = jnp.einsum("chgqk,ckhd->cqhgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.reshape(chunks, width, num_q_heads, v.shape[-1]).astype(q.dtype)
