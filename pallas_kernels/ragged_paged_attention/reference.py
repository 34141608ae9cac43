"""ragged_paged_attention in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def _keys_and_values(
    pages: tuple[jax.Array, ...], num_kv_heads: int | None, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """K and V as [num_pages, page_size, Hkv, D] in float32."""
    if len(pages) == 2:
        return pages[0].astype(jnp.float32), pages[1].astype(jnp.float32)
    flat = pages[0].reshape(*pages[0].shape[:2], -1, pages[0].shape[-1]).astype(jnp.float32)
    heads = flat.shape[2] // 2 if num_kv_heads is None else num_kv_heads
    return flat[:, :, 0 : 2 * heads : 2, :head_dim], flat[:, :, 1 : 2 * heads : 2, :head_dim]


def ragged_paged_attention(
    q: jax.Array,  # [T, Hq, D]
    pages: tuple[jax.Array, ...],
    block_tables: jax.Array,  # int32[S, P]
    seq_lens: jax.Array,  # int32[S]
    query_start_loc: jax.Array,  # int32[S + 1]
    distribution: jax.Array,  # int32[3]
    *,
    sm_scale: float,
    causal: bool,
    sliding_window: int | None,
    attention_chunk_size: int | None,
    num_sink_tokens: int,
    soft_cap: float | None,
    sinks: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    num_kv_heads: int | None,
) -> tuple[jax.Array, jax.Array]:
    """(out, lse) as `AttentionOutput` says."""
    num_tokens, num_q_heads, head_dim = q.shape
    page_size = pages[0].shape[1]
    keys, values = _keys_and_values(pages, num_kv_heads, head_dim)
    group = num_q_heads // keys.shape[2]
    token = jnp.arange(num_tokens)
    seq = jnp.clip(jnp.searchsorted(query_start_loc, token, side="right") - 1, 0, seq_lens.shape[0] - 1)
    real = (token < query_start_loc[distribution[2]]) & (seq < distribution[2])
    pos = seq_lens[seq] - query_start_loc[seq + 1] + token
    upper = pos if causal else seq_lens[seq] - 1
    lower = jnp.zeros_like(pos)
    if sliding_window is not None:
        lower = jnp.maximum(lower, pos - sliding_window + 1)
    if attention_chunk_size is not None:
        lower = jnp.maximum(lower, pos // attention_chunk_size * attention_chunk_size)
    key_pos = jnp.arange(block_tables.shape[1] * page_size)
    visible = (key_pos <= upper[:, None]) & ((key_pos >= lower[:, None]) | (key_pos < num_sink_tokens))
    visible &= real[:, None]
    k = keys[block_tables[seq]].reshape(num_tokens, -1, *keys.shape[2:])
    v = values[block_tables[seq]].reshape(num_tokens, -1, *values.shape[2:])
    one = jnp.ones((), jnp.float32)
    k = k * jnp.reshape(one if k_scale is None else k_scale, (-1, 1))
    v = v * jnp.reshape(one if v_scale is None else v_scale, (-1, 1))
    qg = q.astype(jnp.float32).reshape(num_tokens, -1, group, head_dim)
    s = jnp.einsum("thgd,tkhd->thgk", qg, jnp.where(visible[:, :, None, None], k, 0)) * sm_scale
    s = s.reshape(num_tokens, num_q_heads, -1)
    if soft_cap is not None:
        s = soft_cap * jnp.tanh(s / soft_cap)
    s = jnp.where(visible[:, None, :], s, -jnp.inf)
    if sinks is not None:
        s = jnp.concatenate([s, jnp.broadcast_to(sinks[:, None], (num_tokens, num_q_heads, 1))], axis=-1)
    lse = jnp.where(real[:, None], jax.nn.logsumexp(s, axis=-1), -jnp.inf)
    weights = jnp.exp(s - jnp.where(jnp.isfinite(lse), lse, 0)[..., None])[..., : key_pos.shape[0]]
    weights = jnp.where(visible[:, None, :], weights, 0).reshape(num_tokens, -1, group, key_pos.shape[0])
    out = jnp.einsum("thgk,tkhd->thgd", weights, jnp.where(visible[:, :, None, None], v, 0))
    return out.reshape(num_tokens, num_q_heads, -1).astype(q.dtype), lse
