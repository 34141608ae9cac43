"""The op that MaxText's `Attention.forward_serve_vllm` calls, over kvjax's kernels: on CPU, GPU or TPU.

Flow:    MaxText's projections, metadata -> [sharded_ragged_paged_attention] -> kv_write, ragged_paged_attention
Source:  AI-Hypercomputer/maxtext, layers/attentions.py; the signature is tpu-inference's `layers/common/
         attention_interface.py`, recorded as `sharded_ragged_paged_attention`

Pages are `RPAv3Layout`'s, of heads of 64 numbers too. One KV head of 8 bits is padded there to whole words, which
kvjax's pages of one head are not: the kernel is called for the head and those that the padding has room for.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kvjax.adapters.signatures import Stack
from pallas_kernels.ragged_paged_attention import ragged_paged_attention

MAXTEXT = Stack("maxtext")  # the recorded caller: `MAXTEXT.load("Attention.forward_serve_vllm")`


def sharded_ragged_paged_attention(
    mesh: Any,
    q: jax.Array,  # [T, Hq, D]
    k: jax.Array,  # [T, Hkv, D]
    v: jax.Array,  # [T, Hkv, D]
    kv_cache: jax.Array,  # pages of `RPAv3Layout`
    kv_lens: jax.Array,  # int32[S] with the step's own tokens
    page_indices: jax.Array,  # int32[S * P]
    cu_q_lens: jax.Array,  # int32[S + 1]
    distribution: jax.Array,  # int32[3]
    attention_sink: jax.Array | None,  # float32[Hq]
    sm_scale: float,
    attention_chunk_size: int | None = None,  # tokens that a query sees, itself included: a sliding window
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    update_kv_cache: bool = True,
    use_causal_mask: bool = True,
    attn_logits_soft_cap: float | None = None,
    decode_query_size: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(outputs [T, Hq, D], pages with the step's K and V unless `update_kv_cache` is false).

    Raises:
        ValueError: as `pallas_kernels.ragged_paged_attention`.
        NotImplementedError: a mesh of several devices, scales, or several queries a decoding request.
    """
    if mesh is not None and mesh.size > 1:
        raise NotImplementedError(f"expected a mesh of one device, got {mesh.size}: call it inside shard_map")
    for name, value in {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}.items():
        if value is not None:
            raise NotImplementedError(f"expected {name}=None, got {value}: pages of 8 bits are kvjax's kv_write's")
    if decode_query_size not in (None, 1):
        raise NotImplementedError(f"expected one query of a decoding request, got {decode_query_size}")
    num_q_heads, num_kv_heads = q.shape[1], max(k.shape[1], kv_cache.shape[3] // 2)
    if num_kv_heads > k.shape[1]:
        q, k, v = (_with_heads(x, num_kv_heads // k.shape[1] * x.shape[1], 1) for x in (q, k, v))
        attention_sink = None if attention_sink is None else _with_heads(attention_sink, q.shape[1], 0)
    slots = _slots(kv_lens, page_indices, cu_q_lens, distribution, q.shape[0], kv_cache.shape[1])
    result = ragged_paged_attention(
        q,
        (kv_cache,),
        page_indices.reshape(kv_lens.shape[0], -1),
        kv_lens,
        cu_q_lens,
        distribution,
        new_kv=(k, v) if update_kv_cache else None,
        slot_mapping=slots if update_kv_cache else None,
        num_kv_heads=num_kv_heads,
        sm_scale=sm_scale,
        causal=use_causal_mask,
        sliding_window=attention_chunk_size,
        soft_cap=attn_logits_soft_cap,
        sinks=attention_sink,
    )
    return result.out[:, :num_q_heads], result.pages[0]


def _with_heads(x: jax.Array, num_heads: int, axis: int) -> jax.Array:
    """Zeros for the heads of the padding."""
    return jnp.pad(x, [(0, num_heads - x.shape[axis] if i == axis else 0) for i in range(x.ndim)])


def _slots(
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    num_tokens: int,
    page_size: int,
) -> jax.Array:  # int32[T]
    """The place of each new token: sequence i's are the last of its `kv_lens[i]`; -1 beyond the step's tokens."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    num_seqs = kv_lens.shape[0]
    is_real = jnp.arange(num_seqs) < distribution[2]
    ends = jnp.where(is_real, cu_q_lens[1:], cu_q_lens[distribution[2]])
    seq = jnp.minimum(jnp.sum(token[:, None] >= ends[None], axis=1), num_seqs - 1)
    place = kv_lens[seq] - (cu_q_lens[seq + 1] - token)
    page = page_indices.reshape(num_seqs, -1).at[seq, place // page_size].get(mode="clip")
    return jnp.where(token < ends[-1], page * page_size + place % page_size, -1).astype(jnp.int32)
