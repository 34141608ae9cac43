"""How queries and outputs lie for the matrix products of the TPU kernel.

Flow:    q [T, Hq, D] -> [decode_queries / tile_queries] -> kernel -> [decode_results / tile_results] -> [T, Hq, ...]

Decode: one product covers `heads` KV heads. Their rows stand below each other, and the queries are block-diagonal over
the concatenated head dimensions, [tokens, products, rows, heads * lanes]; the rows of head h keep columns h of the
result.

Tiles of several queries: [tokens, 32-bit words of all heads, packing, 128]. That is q itself but for padding, so a tile
of tokens is one DMA. Heads of more lanes have the words of their first 128 lanes, then of the next. The kernel
rearranges the tile once per item to rows of one KV head, which it reads with strides of whole words:
row = (word of the group * queries + token) * packing + place in the word.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.ragged_paged_attention.tpu_plan import TpuConfig
from pallas_kernels.tpu.mosaic import LANES, SUBLANES, Ref, elements, joined, load_row, store_row


def _pad(x: jax.Array, axis: int, size: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)


def decode_queries(q: jax.Array, config: TpuConfig) -> jax.Array:
    """q [T, Hq, D] as [T, products, rows, heads * lanes]."""
    num_tokens, heads = q.shape[0], config.heads
    x = _pad(q, 2, config.lanes).astype(config.compute_dtype)
    x = x.reshape(num_tokens, config.num_products, heads, config.group, config.lanes)
    x = jnp.einsum("tphgd,hk->tphgkd", x, jnp.eye(heads, dtype=x.dtype))
    x = x.reshape(num_tokens, config.num_products, heads * config.group, heads * config.lanes)
    return _pad(x, 2, config.rows)


def decode_results(x: jax.Array, config: TpuConfig) -> jax.Array:
    """[T, products, rows, n] as [T, Hq, n]."""
    rows = x[:, :, : config.heads * config.group]
    return rows.reshape(x.shape[0], config.num_kv_heads * config.group, x.shape[-1])


def tile_queries(q: jax.Array, config: TpuConfig) -> jax.Array:
    """q [T, Hq, D] as [T, words, packing, 128]."""
    x = _pad(q, 2, config.lanes).astype(config.compute_dtype)
    x = _pad(x.reshape(q.shape[0], config.num_kv_heads, config.group, config.lanes), 2, config.padded_group)
    x = x.reshape(q.shape[0], -1, config.packing, config.num_pieces, LANES)
    return jnp.moveaxis(x, 3, 1).reshape(q.shape[0], -1, config.packing, LANES)


def tile_results(x: jax.Array, config: TpuConfig) -> jax.Array:
    """[T, words, packing, 128] as [T, Hq, lanes]."""
    x = x.reshape(x.shape[0], config.num_pieces, config.num_kv_heads, config.padded_group, LANES)
    x = jnp.moveaxis(x[:, :, :, : config.group], 1, 3)
    return x.reshape(x.shape[0], -1, config.lanes)


def per_row(x: jax.Array, config: TpuConfig, fill: float) -> jax.Array:
    """x float32[Hq] as float32[products, rows, 128], the same in every lane; of tiles [products, 8, padded rows]."""
    x = jnp.asarray(x, jnp.float32).reshape(config.num_kv_heads, config.group)
    if config.queries == 1:
        x = x.reshape(config.num_products, config.heads * config.group)
        x = jnp.pad(x, [(0, 0), (0, config.rows - x.shape[1])], constant_values=fill)
    else:
        x = jnp.pad(x, [(0, 0), (0, config.padded_group - config.group)], constant_values=fill)
        x = jnp.repeat(x.reshape(config.num_kv_heads, -1, 1, config.packing), config.queries, axis=2)
        x = x.reshape(config.num_kv_heads, 1, config.rows)
        x = jnp.pad(x, [(0, 0), (0, 0), (0, config.padded_rows - config.rows)], constant_values=fill)
        return jnp.broadcast_to(x, (x.shape[0], SUBLANES, x.shape[2]))
    return jnp.broadcast_to(x[..., None], (*x.shape, LANES))


def unpack_head(staged: Ref, head: int, rows: Ref, config: TpuConfig) -> None:
    """Rows [rows, lanes] of one KV head of a tile [queries, words, packing, 128]."""
    per_head = config.padded_group // config.packing
    size = config.queries * config.packing
    for piece in range(config.num_pieces):
        for i in range(per_head):
            word = (piece * config.num_kv_heads + head) * per_head + i
            x = elements(load_row(staged, (), 0, config.queries, word), staged.dtype)
            rows[pl.ds(i * size, size), pl.ds(piece * LANES, LANES)] = x


def pack_head(x: jax.Array, head: int, staged: Ref, config: TpuConfig) -> None:
    """Puts the rows [rows, lanes] of one KV head into a tile [queries, words, packing, 128]."""
    per_head = config.padded_group // config.packing
    size = config.queries * config.packing
    for piece in range(config.num_pieces):
        for i in range(per_head):
            part = x[i * size : (i + 1) * size, piece * LANES : (piece + 1) * LANES].astype(staged.dtype)
            word = (piece * config.num_kv_heads + head) * per_head + i
            store_row(staged, word, joined(part))


def lse_rows(config: TpuConfig) -> int:
    """Rows of a token that have an LSE, padding included: those of all products, or all padded groups."""
    if config.queries == 1:
        return config.num_products * config.rows
    return config.num_kv_heads * config.padded_group


def pack_lse(rows: Ref, staged: Ref, config: TpuConfig) -> None:
    """Puts float32 rows [Hkv, rows, 128], equal in all lanes, into a tile [queries, n, 128] with heads in lanes."""
    size = config.queries * config.packing
    lane = lax.broadcasted_iota(jnp.int32, (config.queries, LANES), 1)
    for n in range(staged.shape[1]):
        packed = jnp.zeros(lane.shape, jnp.float32)
        for column in range(n * LANES, min((n + 1) * LANES, lse_rows(config))):
            head, i = divmod(column, config.padded_group)
            first, place = i // config.packing * size, i % config.packing
            x = rows[head, pl.ds(first + place, config.queries, stride=config.packing), :]
            packed = jnp.where(lane == column - n * LANES, x, packed)
        staged[:, pl.ds(n, 1)] = packed[:, None]
