"""gated_delta_rule in plain jnp: the specification, and the CPU path.

A *segment* is one token, or up to `CHUNK_TOKENS` successive ones, of a sequence. Segments come in the order of tokens,
the state going from one to the next. One token takes the recurrence as it stands. A chunk solves for the deltas of its
tokens at once: with `D[t, s]` what decay leaves of token s at token t, and `S` the state before the chunk,

    (I + strictly_lower(beta[t] * k[t] . D[t, s] k[s])) delta = beta * (v - (D[t] k[t])^T S)
    out[t]  =  (D[t] q[t])^T S  +  sum_{s <= t} (q[t] . D[t, s] k[s]) delta[s]
    S       =  D[last] S  +  sum_s (D[last, s] k[s]) delta[s]^T

which is the WY form (arXiv 2412.06464, section 3.3; per channel arXiv 2510.26692, section 3). States that are kept are
those after a segment: chunks end at checkpoints, and tokens with states kept for drafts stand alone.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gated_delta_rule.arguments import Inputs, Options
from pallas_kernels.state_step import StateStep, StepArrays, TokenPieces, with_states
from pallas_kernels.varying import vary_like

CHUNK_TOKENS = 32  # a power of two
_LEAST_TOKENS = 8  # of a chunk; fewer are taken one by one
_LEAST_NUMBERS = 1 << 16  # of a state; chunks of smaller ones cost a CPU more than their tokens one by one
_PAIRED_TOKENS = 4
_L2_EPSILON = 1e-6

_product = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


class TokenStates(NamedTuple):
    """Per token of a step: where it stands, and the pages of the states before and after it."""

    place: jax.Array  # int32[T] among the new tokens of its sequence, -1 for padding
    piece: TokenPieces
    read: jax.Array  # int32[T] page of the sequence's initial state, 0 (the null page, zero) where there is none
    write: jax.Array  # int32[T] page for the state after it, 0 where none is

    @classmethod
    def of(cls, step: StateStep) -> TokenStates:
        """The states of each token of the step."""
        return cls(step.place, step.token_pieces, step.reads, step.writes)


class Segments(NamedTuple):
    """The segments of a step, in order."""

    first: jax.Array  # int32[T] first token
    length: jax.Array  # int32[T] tokens
    num_segments: jax.Array  # int32[]

    @classmethod
    def of(cls, tokens: TokenStates, chunk_tokens: int) -> Segments:
        """Chunks of `chunk_tokens`, the last of a piece shorter; few tokens, and those with pages, one by one."""
        place, total, num_kept = tokens.piece
        alone = num_kept - 1  # the last token's page is that of whatever segment it ends
        rest = (total - alone) % chunk_tokens
        chunked = total - alone - jnp.where(rest < _LEAST_TOKENS, rest, 0)  # of its piece
        in_chunk = place < chunked
        is_first = (tokens.place >= 0) & (~in_chunk | (place % chunk_tokens == 0))
        length = jnp.where(in_chunk, jnp.minimum(chunked - place, chunk_tokens), 1)
        (first,) = jnp.nonzero(is_first, size=is_first.shape[0], fill_value=0)
        return cls(first, length[first], jnp.sum(is_first))


@functools.partial(jax.jit, static_argnames=("options", "chunk_tokens"))
def gated_delta_rule(
    inputs: Inputs, states: jax.Array, arrays: StepArrays, *, options: Options, chunk_tokens: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """(out, states) as `DeltaOutput`; `chunk_tokens` is a power of two, 1: token by token, None: as is faster."""
    if chunk_tokens is None:
        chunk_tokens = CHUNK_TOKENS if math.prod(states.shape[1:]) >= _LEAST_NUMBERS else 1
    tokens = TokenStates.of(StateStep.of(inputs.v.shape[0], arrays))
    out, states = scan(inputs, states, tokens, options, chunk_tokens)
    return out.astype(inputs.v.dtype), states


def scan(
    inputs: Inputs, states: jax.Array, tokens: TokenStates, options: Options, chunk_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """(outputs float32[T, H, V], 0 for padding; states)."""
    num_tokens, num_heads, head_dim = inputs.v.shape
    chunk_tokens = min(chunk_tokens, 1 << (num_tokens - 1).bit_length())
    segments = Segments.of(tokens, chunk_tokens)
    padded = [jnp.pad(x, [(0, chunk_tokens - 1), *[(0, 0)] * (x.ndim - 1)]) for x in inputs]

    def window(first: jax.Array, size: int) -> Inputs:
        return by_head(prepared(Inputs(*(lax.dynamic_slice_in_dim(x, first, size) for x in padded)), options))

    def one(first: jax.Array, _: jax.Array, state: jax.Array, out: jax.Array) -> tuple[jax.Array, jax.Array]:
        state, seen = _token(Inputs(*(x[0] for x in window(first, 1))), state)
        return state, lax.dynamic_update_slice_in_dim(out, seen[None], first, axis=0)

    def chunk(first: jax.Array, length: jax.Array, state: jax.Array, out: jax.Array) -> tuple[jax.Array, jax.Array]:
        inside = jnp.arange(chunk_tokens) < length
        state, seen = _chunk(Inputs(*(_where(inside, x) for x in window(first, chunk_tokens))), state)
        return state, lax.dynamic_update_slice_in_dim(out, seen, first, axis=0)  # later segments write over its end

    def segment(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        states, state, out = carry
        first, length = segments.first[i], segments.length[i]
        begins, page = tokens.place[first] == 0, tokens.read[first]
        state = lax.cond(begins, lambda: states[page].astype(jnp.float32), lambda: state)
        if chunk_tokens == 1:
            state, out = one(first, length, state, out)
        else:
            state, out = lax.cond(length == 1, one, chunk, first, length, state, out)
        return with_states(states, tokens.write[first + length - 1], state), state, out

    state = jnp.zeros(states.shape[1:], jnp.float32)
    out = jnp.zeros((num_tokens + chunk_tokens - 1, num_heads, head_dim), jnp.float32)
    carry = vary_like((states, state, out), *padded, *tokens)
    states, _, out = lax.fori_loop(0, segments.num_segments, segment, carry)
    return _where(tokens.place >= 0, out[:num_tokens]), states


def prepared(inputs: Inputs, options: Options) -> Inputs:
    """float32 inputs with q and k normed, q scaled, and g [T, H, 1 or K]."""
    q, k, v, g, beta = (x.astype(jnp.float32) for x in inputs)
    if options.use_qk_l2norm:
        q, k = (x * inverse_length(x)[..., None] for x in (q, k))
    return Inputs(q * options.scale, k, v, g if g.ndim == 3 else g[..., None], beta)


def inverse_length(x: jax.Array) -> jax.Array:
    """float32[T, G] that divide vectors float32[T, G, K] by their lengths."""
    return lax.rsqrt(jnp.sum(x * x, axis=-1) + _L2_EPSILON)


def by_head(inputs: Inputs) -> Inputs:
    """`prepared` inputs with q and k [T, H, K] of every value head."""
    q, k = (jnp.repeat(x, inputs.v.shape[1] // x.shape[1], axis=1) for x in inputs[:2])
    return inputs._replace(q=q, k=k)


def _token(token: Inputs, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(state, output [H, V]) after a token of inputs `by_head`, without their first axis."""
    q, k, v, g, beta = token
    state = state * jnp.exp(g)[..., None]
    delta = beta[:, None] * (v - _product("hkv,hk->hv", state, k))
    state = state + k[..., None] * delta[:, None]
    return state, _product("hkv,hk->hv", state, q)


def _chunk(tokens: Inputs, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(state, outputs [T, H, V]) after T tokens of inputs `by_head`; those that are all zero change nothing."""
    q, k, v, g = (x.swapaxes(0, 1) for x in tokens[:4])  # heads first
    num_tokens, beta = q.shape[1], tokens.beta.T[..., None]
    entry, exit = jnp.exp(jnp.cumsum(g, axis=1)), jnp.exp(_sums_of_later(g))
    both = jnp.concatenate([k, q], axis=1)
    products = _decayed_products(jnp.stack([k, q]), k, g)
    old = _product("htk,hkv->htv", both * jnp.tile(entry, (1, 2, 1)), state)
    delta = _solve(beta * products[0], beta * (v - old[:, :num_tokens]))
    out = old[:, num_tokens:] + _product("hts,hsv->htv", products[1], delta)
    state = entry[:, -1][..., None] * state + _product("htk,htv->hkv", k * exit, delta)
    return state, out.swapaxes(0, 1)


def _decayed_products(x: jax.Array, k: jax.Array, g: jax.Array) -> jax.Array:
    """float32[n, H, T, T] `x[t] . (exp(g[s + 1] + ... + g[t]) * k[s])` for s <= t, else 0.

    Of x [n, H, T, K], k [H, T, K], g [H, T, 1 or K]; T a power of two. No difference of sums is taken, and nothing
    grows. With a decay per number of the key only a few tokens are taken pair by pair. What one half of a larger block
    gives to the other decays up to the border and from there: a product of matrices.
    """
    n, num_heads, num_tokens, dim = x.shape
    size = num_tokens if g.shape[-1] == 1 else min(num_tokens, _PAIRED_TOKENS)
    blocks = (num_heads, num_tokens // size, size)
    products = _paired_products(x.reshape(n, *blocks, dim), k.reshape(*blocks, dim), g.reshape(*blocks, -1))
    while size < num_tokens:
        halves = (num_heads, num_tokens // (2 * size), 2, size)
        gates = g.reshape(*halves, dim)
        later = x.reshape(n, *halves, dim)[:, :, :, 1] * jnp.exp(jnp.cumsum(gates[:, :, 1], axis=2))
        earlier = k.reshape(*halves, dim)[:, :, 0] * jnp.exp(_sums_of_later(gates[:, :, 0], axis=2))
        across = _product("nhbtk,hbsk->nhbts", later, earlier)
        products = _block_triangles(products[:, :, 0::2], across, products[:, :, 1::2])
        size *= 2
    return products[:, :, 0]


def _paired_products(x: jax.Array, k: jax.Array, g: jax.Array) -> jax.Array:
    """As `_decayed_products`, pair by pair, of blocks [n, H, B, T, K], [H, B, T, K], [H, B, T, 1 or K]."""
    token = jnp.arange(x.shape[3])
    later, same = ((token[:, None] > token)[..., None], (token[:, None] == token)[..., None])
    sums = jnp.cumsum(jnp.where(later, g[..., None, :], 0), axis=2)
    decay = jnp.where(later | same, jnp.exp(sums), 0)
    if g.shape[-1] == 1:
        return _product("nhbtk,hbsk->nhbts", x, k) * decay[..., 0]
    return jnp.sum(x[..., None, :] * k[:, :, None] * decay, axis=-1)


def _solve(matrices: jax.Array, right: jax.Array) -> jax.Array:
    """x of `(I + L) x = right`, where L [H, T, T] is strictly lower triangular: what `matrices` have there.

    By the inverse: those of the blocks along the diagonal, each time of twice the size. Stable, unlike powers of L.
    """
    num_heads, num_tokens, _ = matrices.shape
    inverse = jnp.ones((num_heads, num_tokens, 1, 1), jnp.float32)
    size = 1
    while size < num_tokens:
        blocks = jnp.arange(0, num_tokens, 2 * size)
        rows, columns = (jnp.arange(size)[:, None], jnp.arange(size))
        across = matrices[:, blocks[:, None, None] + size + rows, blocks[:, None, None] + columns]
        first, second = inverse[:, 0::2], inverse[:, 1::2]
        corner = -_product("hbij,hbjk,hbkl->hbil", second, across, first)
        inverse = _block_triangles(first, corner, second)
        size *= 2
    return _product("hts,hsv->htv", inverse[:, 0], right)


def _block_triangles(first: jax.Array, corner: jax.Array, second: jax.Array) -> jax.Array:
    """[..., 2 * T, 2 * T] matrices of T x T blocks, 0 above the diagonal."""
    return jnp.block([[first, jnp.zeros_like(corner)], [corner, second]])


def _sums_of_later(g: jax.Array, axis: int = 1) -> jax.Array:
    """For each along `axis` the sum of those after it."""
    later = lax.slice_in_dim(g, 1, None, axis=axis)
    padding = [(0, int(i == axis)) for i in range(g.ndim)]
    return jnp.pad(lax.cumsum(later, axis=axis, reverse=True), [(0, n) for _, n in padding])


def _where(inside: jax.Array, x: jax.Array) -> jax.Array:
    """x [T, ...] where bool[T] `inside`, else 0."""
    return jnp.where(inside.reshape(-1, *[1] * (x.ndim - 1)), x, 0)
