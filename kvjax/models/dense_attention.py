"""Attention over one whole sequence, for training and tests; nothing is cached.

Flow:    Decoder's q, k, v of a sequence -> [DenseAttention] -> attention outputs

A sliding layer attends chunk by chunk, each to its own and the previous one, so it costs T * 2 * window, not T * T.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.device.attention_options import AttentionOptions


class DenseAttention:
    """Causal attention of tokens 0 .. T-1 of one sequence; `jax.vmap` over the decoder makes batches."""

    def __call__(
        self,
        layer_name: str,
        q: jax.Array,  # [T, Hq, D]
        k: jax.Array,  # [T, Hkv, D]
        v: jax.Array,  # [T, Hkv, D]
        options: AttentionOptions,
    ) -> jax.Array:  # [T, Hq, D]
        """Outputs in the dtype of `q`, accumulated in float32.

        Raises:
            NotImplementedError: the options ask for more than a window and a soft cap.
        """
        _check_options(layer_name, options)
        num_tokens, num_q_heads, head_dim = q.shape
        window = options.sliding_window
        if window is None or window >= num_tokens:
            positions = jnp.arange(num_tokens)[None]
            out = _attend_chunks(q[None], k[None], v[None], positions, positions, options)
            return out.reshape(q.shape)
        chunks = -(-num_tokens // window)
        padding = ((0, chunks * window - num_tokens), (0, 0), (0, 0))
        positions = jnp.arange(chunks * window).reshape(chunks, window)
        q, k, v = (jnp.pad(x, padding).reshape(chunks, window, -1, head_dim) for x in (q, k, v))
        key_positions = jnp.concatenate([positions - window, positions], axis=1)
        out = _attend_chunks(q, _with_previous(k), _with_previous(v), positions, key_positions, options)
        return out.reshape(-1, num_q_heads, head_dim)[:num_tokens]


def _check_options(layer_name: str, options: AttentionOptions) -> None:
    """Raises NotImplementedError for options that only serving has."""
    given = {
        "attention_chunk_size": options.attention_chunk_size is not None,
        "num_sink_tokens": options.num_sink_tokens > 0,
        "sinks": options.sinks is not None,
        "k_scale": options.k_scale is not None,
        "v_scale": options.v_scale is not None,
    }
    if any(given.values()):
        names = ", ".join(name for name, is_given in given.items() if is_given)
        raise NotImplementedError(f"{layer_name}: expected dense attention with a window and a soft cap, got {names}")


def _with_previous(x: jax.Array) -> jax.Array:  # [C, W, H, D] -> [C, 2 * W, H, D]
    """Each chunk behind the one before it; the first behind zeros."""
    return jnp.concatenate([jnp.pad(x[:-1], ((1, 0), (0, 0), (0, 0), (0, 0))), x], axis=1)


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
    distance = q_pos[:, :, None] - k_pos[:, None, :]
    visible = (distance >= 0) & (k_pos >= 0)[:, None, :]
    if options.sliding_window is not None:
        visible &= distance < options.sliding_window
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("chgqk,ckhd->cqhgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.reshape(chunks, width, num_q_heads, head_dim).astype(q.dtype)
