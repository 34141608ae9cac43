"""gated_delta_rule for TPU, decode tokens: eight sequences a step, one token each, a tile of their heads.

Flow:    tokens of the step's decode sequences, pages of their states -> [decode] -> (outputs, states in place)

Grid: tiles of 8 tokens x tiles of heads; states move as in `tpu.decode_states`, a DMA per sequence and tile. Bytes:
each state read and written, beside which the tokens are little; HBM binds. A head is [K, V], numbers of the key one
below the other: products with the state are sums over sublanes, exact in float32, and what a token adds is a column
times a row. Columns come out of one transpose per key head and eight tokens, and serve all value heads of it. Flops:
7 * K * V a head.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.gated_delta_rule.arguments import Inputs
from pallas_kernels.tpu.call import Operand
from pallas_kernels.tpu.decode_states import TOKENS, Pages, launch
from pallas_kernels.tpu.mosaic import LANES, Ref

_BUFFER_BYTES = 5 << 18  # of one buffer, of four


@jax.jit
def decode(
    inputs: Inputs,  # `reference.prepared`: q and k [n, G, K] normed, q scaled; float32; n a multiple of 8
    states: jax.Array,  # [pages, H, K, V]
    read: jax.Array,  # int32[n] pages, 0: from zero
    write: jax.Array,  # int32[n] pages, 0: nowhere
    num_decode: jax.Array,  # int32[]
) -> tuple[jax.Array, jax.Array]:
    """(outputs float32[n, H, V], right for the first `num_decode` tokens, states)."""
    q, k, v, g, beta = inputs
    num_tokens, num_heads, value_dim = v.shape
    key_heads, key_dim = k.shape[1:]
    group = num_heads // key_heads
    heads = heads_per_tile(num_heads, group, key_dim * value_dim * states.dtype.itemsize)
    keys = max(1, heads // group)  # key heads of a tile

    def key_tile(i: jax.Array, j: jax.Array, *_: Ref) -> tuple[jax.Array, jax.Array]:
        return i, j * heads // (group * keys)

    of_keys = pl.BlockSpec((TOKENS, keys * key_dim), key_tile)
    scalars = pl.BlockSpec((TOKENS, num_heads), lambda i, j, *_: (i, 0), memory_space=pltpu.SMEM)
    values = pl.BlockSpec((TOKENS, heads * value_dim), lambda i, j, *_: (i, j))
    channels = pl.BlockSpec((TOKENS, heads * key_dim), lambda i, j, *_: (i, j))
    decay = jnp.exp(g)
    is_per_channel = g.shape[2] > 1
    out, states = launch(
        functools.partial(_decode, heads=heads, keys=keys, is_per_channel=is_per_channel),
        _Heads(
            q=Operand(q.reshape(num_tokens, -1), of_keys),
            k=Operand(k.reshape(num_tokens, -1), of_keys),
            v=Operand(v.reshape(num_tokens, -1), values),
            decay=Operand(decay.reshape(num_tokens, -1), channels if is_per_channel else scalars),
            beta=Operand(beta, scalars),
        ),
        Operand(jax.ShapeDtypeStruct((num_tokens, num_heads * value_dim), jnp.float32), values),
        states,
        (heads, key_dim, value_dim),
        0,
        Pages(read, write, num_decode),
        name=f"delta_decode_h{heads}",
    )
    return out.reshape(v.shape), states


def heads_per_tile(num_heads: int, group: int, head_bytes: int) -> int:
    """Value heads of a tile: parts of a group, or whole groups, that divide all heads and fill a buffer at most."""
    most = max(1, _BUFFER_BYTES // (TOKENS * head_bytes))
    fitting = [n for n in range(1, min(num_heads, most) + 1) if num_heads % n == 0]
    return max(n for n in fitting if n % group == 0 or group % n == 0)


class _Heads(NamedTuple):
    """What a tile of heads of eight tokens reads."""

    q: Ref  # float32[8, keys * K]
    k: Ref  # float32[8, keys * K]
    v: Ref  # float32[8, heads * V]
    decay: Ref  # float32[8, heads * K]; or float32[8, H] in SMEM
    beta: Ref  # float32[8, H] in SMEM


def _decode(
    inputs: _Heads,
    out: Ref,  # float32[8, heads * V]
    before: Ref,  # [8, heads, K, V]
    after: Ref,
    *,
    heads: int,
    keys: int,
    is_per_channel: bool,
) -> None:
    """One tile of heads of eight tokens."""
    q, k, v, decay, beta = inputs
    key_dim, value_dim = before.shape[2:]
    first = pl.program_id(1) * heads
    for key in range(keys):
        own = range(key * heads // keys, (key + 1) * heads // keys)
        lanes = slice(key * key_dim, (key + 1) * key_dim)
        rows = [k[:, lanes], q[:, lanes]]
        if is_per_channel:
            rows += [decay[:, h * key_dim : (h + 1) * key_dim] for h in own]
        columns = _columns(rows)
        for t in range(TOKENS):
            of_k, of_q = (_column(columns, n * TOKENS + t, value_dim) for n in range(2))
            for n, h in enumerate(own):
                kept = _column(columns, (2 + n) * TOKENS + t, value_dim) if is_per_channel else decay[t, first + h]
                where = slice(h * value_dim, (h + 1) * value_dim)
                state = before[t, h].astype(jnp.float32) * kept
                delta = beta[t, first + h] * (v[t : t + 1, where] - jnp.sum(state * of_k, axis=0, keepdims=True))
                state = state + of_k * delta
                after[t, h] = state.astype(after.dtype)
                out[t : t + 1, where] = jnp.sum(state * of_q, axis=0, keepdims=True)


def _columns(rows: list[jax.Array]) -> jax.Array:
    """[K, lanes]: the rows of [8, K] arrays, one beside the other; lanes a multiple of 128."""
    padding = -len(rows) * TOKENS % LANES
    return jnp.transpose(jnp.pad(jnp.concatenate(rows), [(0, padding), (0, 0)]))


def _column(columns: jax.Array, lane: int, count: int) -> jax.Array:
    """A lane of [K, lanes] in `count` lanes."""
    return jnp.broadcast_to(columns[:, lane : lane + 1], (columns.shape[0], count))
