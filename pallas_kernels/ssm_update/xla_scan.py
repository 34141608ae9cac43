"""selective_scan in plain XLA, vectorised: what GPUs run whose kernels cannot take a call.

Flow:    api -> [selective_scan] -> sequences of one token, of drafts, of several tokens -> (out, states)
Source:  Mamba-2 (arXiv 2405.21060, section 6): within a tile a masked attention, between tiles the state

Sequences of one token are advanced many at a time. Those that keep states for drafts have few tokens and go by the
reference. Those of several tokens, in Mamba 2, are cut into tiles; some tiles at a time take batched products, and
states pass from tile to tile in a loop:

    out[t]  = sum_s decay(s, t) * dt[s] * (c[t] . b[s]) * x[s]  +  decay(-1, t) * c[t] . state
    state   = decay(-1, last) * state  +  sum_s decay(s, last) * dt[s] * x[s] * b[s]

where `decay(s, t)` is `exp` of the sum of `dt * a` from s + 1 to t, a difference of `RunningSums`.
Mamba 1 has no such form; the reference's scan over tokens takes it. Temporaries: about `_TRIP_BYTES` for each of a few
arrays of a trip.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends import XlaPath
from pallas_kernels.layouts import cdiv
from pallas_kernels.lazy import lazy
from pallas_kernels.mask import MaskRule
from pallas_kernels.schedule import Batch, QueryTile, query_tiles
from pallas_kernels.ssm_update import reference
from pallas_kernels.ssm_update.arguments import Scan
from pallas_kernels.ssm_update.reference import scan_drafts, time_steps
from pallas_kernels.ssm_update.running_sums import RunningSums
from pallas_kernels.state_step import StateStep, StepArrays, with_states
from pallas_kernels.varying import vary_like

if TYPE_CHECKING:
    from pallas_kernels.ssm_update import triton_scan
else:
    triton_scan = lazy("pallas_kernels.ssm_update.triton_scan")

_TRIP_BYTES = 32 << 20  # of states, or of a tile's weights
_TILE_TOKENS = 256


def path_over(states: jax.Array, num_seqs: int) -> XlaPath:
    """What a call costs: states are read, written, and read and written in their pages; and all inputs."""
    state_bytes = math.prod(states.shape[1:]) * states.dtype.itemsize
    return XlaPath(5, num_seqs * state_bytes, "the states of its sequences", triton_passes=5)


class Tokens(NamedTuple):
    """Inputs of a step's tokens."""

    x: jax.Array  # [T, H, P]
    dt: jax.Array  # float32[T, H] time steps
    b: jax.Array  # [T, G, N]
    c: jax.Array

    def at(self, token: jax.Array, is_real: jax.Array) -> Tokens:
        """The tokens at int32[...] places, 0 where not bool[...] `is_real`."""

        def take(x: jax.Array) -> jax.Array:
            rows = x[jnp.clip(token, 0, x.shape[0] - 1)]
            return jnp.where(is_real.reshape(*is_real.shape, *[1] * (x.ndim - 1)), rows, 0)

        return Tokens(*map(take, self))


class Weights(NamedTuple):
    """The weights of the heads."""

    a: jax.Array  # float32[H]
    d: jax.Array | None  # [H]

    def with_skip(self, seen: jax.Array, x: jax.Array) -> jax.Array:
        """`seen + d * x` in the dtype of inputs x [..., H, P], of float32 `seen` of that shape."""
        if self.d is not None:
            seen = seen + self.d.astype(jnp.float32)[:, None] * x.astype(jnp.float32)
        return seen.astype(x.dtype)


@functools.partial(jax.jit, static_argnames=("dt_limit", "tile_tokens", "trip_bytes", "by_triton"))
def selective_scan(
    arguments: Scan,
    states: jax.Array,
    arrays: StepArrays,
    *,
    dt_limit: tuple[float, float],
    tile_tokens: int = _TILE_TOKENS,
    trip_bytes: int = _TRIP_BYTES,
    by_triton: triton_scan.Sizes | None = None,  # a kernel in Triton for sequences of several tokens
) -> tuple[jax.Array, jax.Array]:
    """(out, states) as `SsmOutput`."""
    x, dt, a, b, c, d, dt_bias = arguments
    if x.ndim == 2:
        return reference.selective_scan(arguments, states, arrays, dt_limit=dt_limit)
    step = StateStep.of(x.shape[0], arrays)
    a = a.astype(jnp.float32)
    tokens = Tokens(x, time_steps(dt, dt_bias, dt_limit), b, c)
    weights = Weights(a, d)
    out = vary_like(jnp.zeros_like(x), *tokens, states, *step)
    if step.write.shape[1] > 1:
        of_drafts, drafts, states = scan_drafts(x, tokens.dt, a, b, c, states, step)
        out = jnp.where(of_drafts[:, None, None], weights.with_skip(drafts, x), out)
    step = step.without_drafts()
    with jax.named_scope("single"):
        out, states = _single_tokens(out, states, tokens, weights, step, trip_bytes)
    if x.shape[0] > 1 and by_triton is not None:
        out, states = triton_scan.scan_sequences(*tokens, a, d, step, out, states, by_triton)
    elif x.shape[0] > 1:
        with jax.named_scope("tiles"):
            out, states = _tiles(out, states, tokens, weights, step, min(tile_tokens, x.shape[0]), trip_bytes)
    return out, states


def _single_tokens(
    out: jax.Array, states: jax.Array, tokens: Tokens, weights: Weights, step: StateStep, trip_bytes: int
) -> tuple[jax.Array, jax.Array]:
    """`out` [T, H, P] and `states` after the sequences of one token."""
    num_tokens, num_heads, _ = tokens.x.shape
    num_seqs = step.q_lens.shape[0]
    size = _sequences_of_trip(states.shape, num_seqs, trip_bytes)
    count = jnp.sum(step.q_lens == 1)
    (order,) = jnp.nonzero(step.q_lens == 1, size=-(-num_seqs // size) * size, fill_value=num_seqs)

    def trip(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, states = carry
        seq = lax.dynamic_slice_in_dim(order, i * size, size)
        is_real = seq < num_seqs
        seq = jnp.minimum(seq, num_seqs - 1)
        x, dt, b, c = tokens.at(step.starts[seq], is_real)
        b, c = (_by_head(y, num_heads) for y in (b, c))  # [n, H, N]
        before = states[jnp.where(is_real, step.read[seq], 0)].astype(jnp.float32)
        inflow = (dt[..., None] * x.astype(jnp.float32))[..., None] * b[:, :, None]
        after = lax.optimization_barrier(jnp.exp(dt * weights.a)[..., None, None] * before + inflow)
        seen = weights.with_skip(jnp.sum(after * c[:, :, None], axis=-1), x)
        out = out.at[jnp.where(is_real, step.starts[seq], num_tokens)].set(seen, mode="drop")
        return out, with_states(states, jnp.where(is_real, step.last_write[seq], 0), after)

    return lax.fori_loop(0, -(-count // size), trip, vary_like((out, states), *tokens, *step))


def _sequences_of_trip(states_shape: tuple[int, ...], num_seqs: int, trip_bytes: int) -> int:
    """Sequences of one token that are advanced at a time."""
    most = max(1, trip_bytes // (4 * math.prod(states_shape[1:])))
    return cdiv(num_seqs, cdiv(num_seqs, most))


def _tiles_of_trip(
    states_shape: tuple[int, ...], num_seqs: int, num_tokens: int, tile_tokens: int, trip_bytes: int
) -> int:
    """Tiles that are advanced at a time: their weights in 16 bits, and their states, are `trip_bytes` at most."""
    tile_bytes = max(2 * states_shape[1] * tile_tokens**2, 4 * math.prod(states_shape[1:]))
    return min(num_tokens, num_tokens // tile_tokens + num_seqs, max(1, trip_bytes // tile_bytes))


def num_trips(
    states_shape: tuple[int, ...], num_seqs: int, num_tokens: int, num_single: int, others: Sequence[int]
) -> dict[str, int]:
    """Runs of the loops, by their scopes, of a step of `num_single` sequences of one token and of `others` tokens."""
    size = min(_TILE_TOKENS, num_tokens)
    together = _tiles_of_trip(states_shape, num_seqs, num_tokens, size, _TRIP_BYTES)
    return {
        "single": cdiv(num_single, _sequences_of_trip(states_shape, num_seqs, _TRIP_BYTES)),
        "tiles": cdiv(sum(cdiv(num, size) for num in others), together),
    }


def _tiles(
    out: jax.Array, states: jax.Array, tokens: Tokens, weights: Weights, step: StateStep, size: int, trip_bytes: int
) -> tuple[jax.Array, jax.Array]:
    """`out` and `states` after the sequences of several tokens, their pieces in tiles of `size`."""
    pieces = step._replace(q_lens=jnp.where(step.q_lens > 1, step.q_lens, 0)).pieces
    num_tokens, num_pieces, q_lens = tokens.x.shape[0], pieces.q_lens.shape[0], pieces.q_lens
    together = _tiles_of_trip(states.shape, num_pieces, num_tokens, size, trip_bytes)
    room = cdiv(min(num_tokens, num_tokens // size + num_pieces), together) * together
    batch = Batch(q_lens, pieces.starts, q_lens)  # so that positions are places among the tokens of a piece
    tiles, count = query_tiles(batch, MaskRule(), room=room, queries=size, page_size=1)
    carry = (out, states, jnp.zeros(states.shape[1:], jnp.float32))

    def trip(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        out, states, state = carry
        own = QueryTile(*(lax.dynamic_slice_in_dim(x, i * together, together) for x in tiles))
        place = own.first_pos[:, None] + jnp.arange(size, dtype=jnp.int32)
        is_real = place <= own.last_pos[:, None]
        is_first, is_last = own.first_pos == 0, own.last_pos == q_lens[own.seq] - 1  # of a piece
        is_tile = own.last_pos >= 0
        given = tokens.at(own.token[:, None] + jnp.arange(size, dtype=jnp.int32), is_real)
        is_first = is_first if pieces.before is None else is_first & (pieces.before[own.seq] == 0)
        read = jnp.where(is_tile & is_first, pieces.read[own.seq], 0)
        write = jnp.where(is_tile & is_last, pieces.write[own.seq], 0)
        seen, states, state = _advance(given, weights.a, Ends(is_first, read, write), states, state)
        token = jnp.where(is_real, own.token[:, None] + jnp.arange(size, dtype=jnp.int32), num_tokens)
        return out.at[token].set(weights.with_skip(seen, given.x), mode="drop"), states, state

    carry = vary_like(carry, *tokens, *step)
    out, states, _ = lax.fori_loop(0, -(-count // together), trip, carry)
    return out, states


class Ends(NamedTuple):
    """Where tiles begin and end."""

    is_first: jax.Array  # bool[n] tiles that start from a page's state
    read: jax.Array  # int32[n] that page
    write: jax.Array  # int32[n] the page of the state after the tile; 0: none


def _advance(
    tokens: Tokens,  # [n, Q, ...]
    a: jax.Array,  # float32[H]
    ends: Ends,
    states: jax.Array,  # [pages, H, P, N]
    state: jax.Array,  # float32[H, P, N] what the first of the tiles that start from no page does
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(outputs float32[n, Q, H, P], `states` with those at the ends of sequences, the state after the last tile)."""
    x, dt, b, c = tokens
    num_tiles, size, num_heads, head_dim = x.shape
    grouped = (num_tiles, b.shape[2], num_heads // b.shape[2])
    sums = RunningSums.of(jnp.moveaxis(dt * a, 1, 2))  # [n, H, Q]
    scores = _product("ntgk,nsgk->ngts", c, b)
    weights = sums.decays().reshape(*grouped, size, size) * scores[:, :, None]
    weights = (weights * jnp.moveaxis(dt, 1, 2).reshape(*grouped, 1, size)).astype(x.dtype)
    inside = _product("nhts,nshp->nthp", weights.reshape(num_tiles, num_heads, size, size), x)
    entry, shares = sums.since_start(), jnp.moveaxis(sums.until_end(), 1, 2) * dt  # [n, H, Q], [n, Q, H]
    weighed = (x.astype(jnp.float32) * shares[..., None]).reshape(num_tiles, size, *grouped[1:], head_dim)
    inflow = _product("nsghp,nsgk->nghpk", weighed, b.astype(jnp.float32))
    inflow = inflow.reshape(num_tiles, num_heads, head_dim, -1)

    def pass_on(
        carry: tuple[jax.Array, jax.Array], tile: tuple[Ends, jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        (states, state), (own, kept, inflow) = carry, tile
        before = jnp.where(own.is_first, states[own.read].astype(jnp.float32), state)
        after = kept[:, None, None] * before + inflow
        return (with_states(states, own.write, after), after), before.astype(c.dtype)

    (states, state), before = lax.scan(pass_on, (states, state), (ends, entry[:, :, -1], inflow))
    from_before = _product("ntgk,nghpk->ntghp", c, before.reshape(*grouped, *before.shape[2:])).reshape(x.shape)
    return inside + jnp.moveaxis(entry, 1, 2)[..., None] * from_before, states, state


def _by_head(x: jax.Array, num_heads: int) -> jax.Array:
    """[..., H, N] of [..., G, N]."""
    return jnp.repeat(x, num_heads // x.shape[-2], axis=-2)


def _product(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """float32 products, exact ones of float32."""
    if x.dtype != y.dtype:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(equation, x, y, precision=precision, preferred_element_type=jnp.float32)
