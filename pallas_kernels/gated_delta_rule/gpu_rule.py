"""gated_delta_rule on NVIDIA GPUs of Hopper, in Pallas Mosaic GPU: a state in registers over its sequence's tokens.

Flow:    api -> [gated_delta_rule] -> one launch for decode, drafts and longer sequences -> (out, states in place)
Source:  the recurrence as `reference` states it; the state stays on chip, only inputs and outputs move

Grid: sequences and the padding x value heads x tiles of a head's columns; a thread block is one warpgroup. It reads its
columns of the state from the sequence's page, walks over the new tokens, and writes them back after each token whose
state is kept. These are plain loads and stores of whole sectors; many blocks to a multiprocessor hide them. Columns of
a state never meet, so blocks do not wait for each other. Padding is a sequence of its own, without states, whose
outputs are 0.

Both sums over a state, with k and with q, are taken before the token changes it, so that neither waits for the other:

    delta = a * v - b * (state^T k),   out = c * (state^T q) + e * delta,   state = decay * state + k delta^T

with factors of each token and head (`_Factor`) that XLA makes: norms, scale, beta and `k . q` are in them, so that the
kernel reads q and k as they are. A decay per number of the key goes into k and q of both sums.

Decode reads each state once and writes it once, which is nearly all of its bytes; memory binds. A longer sequence takes
its tokens one after the other, four instructions for every 32 numbers of the state and token on plain cores; the tensor
core is not used. Inputs of a few tokens are loaded while the few before are computed, since one sequence alone would
wait for each; where a step has no more tokens than sequences that is left out, and the registers that it takes go to
larger tiles of a state.
"""

from __future__ import annotations

import enum
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gated_delta_rule.arguments import Inputs, Options
from pallas_kernels.gated_delta_rule.reference import inverse_length
from pallas_kernels.gpu import mosaic
from pallas_kernels.gpu.call import call
from pallas_kernels.gpu.places import PagePlaces, PageView, reason_of_places, with_memory
from pallas_kernels.gpu.recurrence import over_tokens
from pallas_kernels.state_step import Checkpoints, StateStep, StepArrays

_WIDE, _NARROW = 64, 32  # columns of a tile
_TILE_NUMBERS = 8192  # of a state, at most
_AHEAD_NUMBERS = 512  # of keys, of the tokens whose inputs are loaded together
_MOST_TOKENS = 4


class _Factor(enum.IntEnum):
    """Scalars of a token and value head, float32; `inverse` is 1, or with the norm 1 over a length."""

    VALUE = 0  # a: beta * inverse of k
    OLD = 1  # b: beta * (inverse of k)^2, and the decay of a head
    SEEN = 2  # c: scale * inverse of q, and the decay of a head
    OWN = 3  # e: scale * inverse of q * (k . q)
    DECAY = 4  # of a head, else unused


def reason_not_supported(v: jax.Array, k: jax.Array, g: jax.Array, states: jax.Array) -> str | None:
    """What of a call the kernel cannot do, in words; None if it can do it all."""
    key_dim, value_dim = states.shape[2:]
    most = _TILE_NUMBERS // _NARROW
    step = mosaic.lane_columns_step(_NARROW)
    if key_dim % step or key_dim > most:
        return f"GPU kernels take keys in multiples of {step} up to {most} numbers, got {key_dim}"
    if value_dim % _NARROW:
        return f"GPU kernels take values in multiples of {_NARROW} numbers, got {value_dim}"
    of_floats = mosaic.reason_of_floats(v, k, g, states)
    return of_floats or reason_of_places(states, 1, 1) or mosaic.reason_without_hopper()


@functools.partial(jax.jit, static_argnames="options")
def gated_delta_rule(
    inputs: Inputs, states: jax.Array, arrays: StepArrays, *, options: Options
) -> tuple[jax.Array, jax.Array]:
    """(out, states) as `DeltaOutput`."""
    q, k, v, g, _ = inputs
    _, num_heads, key_dim, value_dim = states.shape
    step = StateStep.of(v.shape[0], arrays)
    num_real = jnp.sum(step.q_lens)
    starts = jnp.append(step.starts, num_real)
    q_lens = jnp.append(step.q_lens, v.shape[0] - num_real)  # the last: padding
    is_per_channel = g.ndim == 3
    tile = _Tile.of(v.shape, key_dim, k.shape[1], q_lens.shape[0] - 1, is_per_channel)
    rows, places = PageView.of(states, 1)
    results = call(
        functools.partial(_walk, tile=tile, places=places),
        _Refs,
        name=f"delta_c{tile.columns}_t{tile.num_tokens}{'_channel' if is_per_channel else ''}",
        grid={"seq": q_lens.shape[0], "head": num_heads, "tile": value_dim // tile.columns},
        inputs={
            "starts": starts,
            "q_lens": q_lens,
            "read": step.read,
            "write": step.write,
            "checkpoints": step.checkpoints,
            "q": q,
            "k": k,
            "v": v,
            "g": g,
            "factors": _factors(inputs, options),
        },
        in_place={"states": rows},
        outputs={"out": jax.ShapeDtypeStruct(v.shape, v.dtype)},
    )
    return results["out"], with_memory(states, results["states"])


class _Refs(NamedTuple):
    """References in global memory."""

    starts: Any  # int32[S + 1] first new token of each sequence, and of the padding
    q_lens: Any  # int32[S + 1]
    read: Any  # int32[S] pages
    write: Any  # int32[S, states kept of each] pages, 0: none
    checkpoints: Checkpoints | None
    q: Any  # [T, G, K]
    k: Any  # [T, G, K]
    v: Any  # [T, H, V]
    g: Any  # [T, H] or [T, H, K]
    factors: Any  # float32[T, H, factors]
    states: Any  # [rows, V], K rows of each of a page's H heads
    out: Any  # [T, H, V]


def _factors(inputs: Inputs, options: Options) -> jax.Array:
    """float32[T, H, factors]."""
    q, k, v, g, beta = (x.astype(jnp.float32) for x in inputs)
    group = v.shape[1] // k.shape[1]

    def by_head(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, group, axis=1)

    ones = jnp.ones(k.shape[:2], jnp.float32)
    of_q, of_k = (by_head(inverse_length(x) if options.use_qk_l2norm else ones) for x in (q, k))
    decay = jnp.exp(g) if g.ndim == 2 else jnp.ones_like(beta)
    value, seen = beta * of_k, options.scale * of_q
    factors = {
        _Factor.VALUE: value,
        _Factor.OLD: value * of_k * decay,
        _Factor.SEEN: seen * decay,
        _Factor.OWN: seen * by_head(jnp.sum(k * q, axis=-1)),
        _Factor.DECAY: decay,
    }
    return jnp.stack([factors[factor] for factor in _Factor], axis=-1)


class _Tile(NamedTuple):
    """What one thread block has of a state, and how it goes over tokens."""

    key_dim: int
    columns: int
    heads_per_key: int
    is_per_channel: bool
    num_tokens: int  # whose inputs are loaded together, ahead

    @classmethod
    def of(cls, shape: tuple[int, ...], key_dim: int, key_heads: int, num_seqs: int, is_per_channel: bool) -> _Tile:
        """The tile of values [T, H, V]: wide where sequences have one token at most, if that divides a head."""
        room, num_heads, value_dim = shape
        columns, num_tokens = _NARROW, 1
        if room > num_seqs:
            num_tokens = max(1, min(_MOST_TOKENS, _AHEAD_NUMBERS // key_dim))
        elif value_dim % _WIDE == 0 and _WIDE * key_dim <= _TILE_NUMBERS:
            columns = _WIDE
        return cls(key_dim, columns, num_heads // key_heads, is_per_channel, num_tokens)

    @property
    def layout(self) -> Any:
        """The layout of the tile in registers."""
        return mosaic.lane_columns(self.columns)

    def across(self, per_row: jax.Array) -> jax.Array:
        """A value per row as a matrix."""
        return lax.broadcast_in_dim(per_row, (self.key_dim, self.columns), [0])

    def down(self, per_column: jax.Array) -> jax.Array:
        """A value per column as a matrix."""
        return lax.broadcast_in_dim(per_column, (self.key_dim, self.columns), [1])


class _Token(NamedTuple):
    """Inputs of one token as they come from memory."""

    q: jax.Array  # [K]
    k: jax.Array  # [K]
    v: jax.Array  # [columns]
    g: jax.Array | None  # [K] of a decay per number of the key
    factors: tuple[jax.Array, ...]  # float32[] each


class _Share(NamedTuple):
    """Which part of a step's tokens and states one thread block has."""

    refs: _Refs
    tile: _Tile
    places: PagePlaces  # in rows
    seq: jax.Array
    head: jax.Array
    columns: Any  # of the head
    first: jax.Array  # token
    end: jax.Array

    @property
    def write(self) -> Any:
        """Pages of the states that are kept."""
        return self.refs.write

    @property
    def checkpoints(self) -> Any:
        """Where states are left on the way, or None."""
        return self.refs.checkpoints

    @property
    def num_together(self) -> int:
        """Tokens whose inputs are loaded together, ahead."""
        return self.tile.num_tokens

    def load(self, token: jax.Array) -> _Token:
        """Inputs of a token, or of the last one where it is beyond that."""
        refs, layout = self.refs, self.tile.layout
        token = lax.min(token, self.end - 1)
        key_head = lax.div(self.head, jnp.int32(self.tile.heads_per_key))
        of_key, of_value = layout.reduce(1), layout.reduce(0)
        return _Token(
            q=mosaic.load(refs.q.at[token, key_head], of_key),
            k=mosaic.load(refs.k.at[token, key_head], of_key),
            v=mosaic.load(refs.v.at[token, self.head, self.columns], of_value),
            g=mosaic.load(refs.g.at[token, self.head], of_key) if self.tile.is_per_channel else None,
            factors=tuple(refs.factors[token, self.head, factor] for factor in _Factor),
        )

    def advance(self, token: jax.Array, state: jax.Array, inputs: _Token) -> jax.Array:
        """The state after a token, whose output it stores."""
        state, seen = _advance(self.tile, state, inputs)
        self.store(token, seen)
        return state

    def store(self, token: jax.Array, out: jax.Array) -> None:
        """Stores the output of a token."""
        target = self.refs.out.at[token, self.head, self.columns]
        mosaic.store_plain(target, out.astype(self.refs.out.dtype))

    def in_page(self, page: jax.Array) -> Any:
        """The tile of a page's state, a reference."""
        key_dim = self.tile.key_dim
        return self.refs.states.at[pl.ds(self.places.entry(page) + self.head * key_dim, key_dim), self.columns]

    def store_state(self, page: jax.Array, state: jax.Array) -> None:
        """Stores a state in a page."""
        mosaic.store_plain(self.in_page(page), state.astype(self.refs.states.dtype))


def _walk(refs: _Refs, tile: _Tile, places: PagePlaces) -> None:
    """One tile of one head of one sequence over its tokens; padding and the long sequences, which are last, first."""
    padding = refs.read.shape[0]
    seq = padding - lax.axis_index("seq")
    head = lax.axis_index("head")
    columns = pl.ds(pl.multiple_of(lax.axis_index("tile") * tile.columns, tile.columns), tile.columns)
    first, count = refs.starts[seq], refs.q_lens[seq]
    share = _Share(refs, tile, places, seq, head, columns, first, first + count)

    @pl.when((seq < padding) & (count > 0))
    def _() -> None:
        over_tokens(share, mosaic.load(share.in_page(refs.read[seq]), tile.layout).astype(jnp.float32))

    @pl.when(seq == padding)
    def _() -> None:
        def clear(token: jax.Array, carry: None) -> None:
            share.store(token, mosaic.zeros((tile.columns,), jnp.float32, tile.layout.reduce(0)))
            return carry

        lax.fori_loop(share.first, share.end, clear, None)


def _advance(tile: _Tile, state: jax.Array, token: _Token) -> tuple[jax.Array, jax.Array]:
    """(state float32[K, columns] after a token, its output float32[columns])."""
    k, q = (x.astype(jnp.float32) for x in (token.k, token.q))
    of_value, of_old, of_seen, of_own, decay = token.factors
    old, seen, kept = k, q, decay
    if token.g is not None:
        per_row = jnp.exp(token.g.astype(jnp.float32))
        old, seen, kept = k * per_row, q * per_row, tile.across(per_row)
    delta = of_value * token.v.astype(jnp.float32) - of_old * jnp.sum(state * tile.across(old), axis=0)
    out = of_seen * jnp.sum(state * tile.across(seen), axis=0) + of_own * delta
    return state * kept + tile.across(k) * tile.down(delta), out
