"""Mamba 2's scan over sequences of several tokens, in Triton: one program for a head of a sequence.

Flow:    inputs of the tokens, states in pages -> [scan_sequences] -> outputs, states after the last tokens
Source:  Mamba-2 (arXiv 2405.21060, section 6): within a tile a masked attention, between tiles the state

Grid (sequences, heads). A program takes its sequence in tiles of `Sizes.tokens`, with the state in its registers:

    out[t]  = sum_s decay(s, t) * dt[s] * (c[t] . b[s]) * x[s]  +  decay(-1, t) * c[t] . state  +  d * x[t]
    state   = decay(-1, last) * state  +  sum_s decay(s, last) * dt[s] * x[s] * b[s]

What crosses memory: x and outputs once, states read and written once, b and c once a head. Decays are differences of
`RunningSums`. What is added to the state is exact to float32: where b is bfloat16, the other factor is cut into three
parts of it, of which each product is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gpu.places import PageNumbers, slabs_of, with_memory
from pallas_kernels.ssm_update.running_sums import RunningSums
from pallas_kernels.state_step import StateStep
from pallas_kernels.triton.call import LEAST, call, load, power_from, product, reason_without_triton, store


@dataclass(frozen=True)
class Sizes:
    """How much a program has at a time."""

    tokens: int = 32  # of a tile: a power of two, at least 16
    num_warps: int = 8


class Refs(NamedTuple):
    """Arrays as a program sees them."""

    x: Any  # [T, H, P]
    dt: Any  # float32[T, H] time steps
    b: Any  # [T, G, N]
    c: Any
    a: Any  # float32[H]
    d: Any  # float32[H]
    starts: Any  # int32[S]
    q_lens: Any  # int32[S] tokens; 0: not a sequence of this kernel
    read: Any  # int32[S]
    write: Any  # int32[S] 0: none
    out: Any  # as x
    states: Any  # [slabs, numbers], of a page [H, P, N]


def reason_not_supported(x: jax.Array) -> str | None:
    """What of a call the kernel cannot do, in words; None if it can do it all."""
    return "the kernel in Triton is of Mamba 2" if x.ndim == 2 else reason_without_triton()


def scan_sequences(
    x: jax.Array,  # [T, H, P]
    dt: jax.Array,  # float32[T, H] time steps
    b: jax.Array,  # [T, G, N]
    c: jax.Array,
    a: jax.Array,  # float32[H]
    d: jax.Array | None,  # [H]
    step: StateStep,
    out: jax.Array,  # as x
    states: jax.Array,  # [pages, H, P, N]
    sizes: Sizes,
) -> tuple[jax.Array, jax.Array]:
    """`out` and `states` with those of the sequences of several tokens."""
    q_lens = jnp.where(step.q_lens > 1, step.q_lens, 0)
    skip = jnp.zeros_like(a) if d is None else d.astype(jnp.float32)
    b, c = (y.astype(jnp.promote_types(b.dtype, c.dtype)) for y in (b, c))

    def body(*refs: Any) -> None:
        _scan(Refs(*refs), PageNumbers.of(states), sizes)

    out, after = call(
        body,
        name="scan_sequences",
        grid=(q_lens.shape[0], x.shape[1]),
        inputs=[x, dt, b, c, a, skip, step.starts, q_lens, step.read, step.last_write],
        outputs=[],
        in_place=[out, slabs_of(states)],
        num_warps=sizes.num_warps,
        num_stages=1,
    )
    return out, with_memory(states, after)


def _scan(refs: Refs, pages: PageNumbers, sizes: Sizes) -> None:
    """A head of a sequence."""
    seq, head = pl.program_id(0), pl.program_id(1)
    head_dim, state_dim = refs.x.shape[2], refs.b.shape[2]
    q_len = refs.q_lens[seq]
    row, column = (lax.iota(jnp.int32, max(LEAST, power_from(n))) for n in (head_dim, state_dim))
    inside = (row < head_dim)[:, None] & (column < state_dim)[None]
    at = (head, row[:, None], column[None])

    def tile(i: jax.Array, state: jax.Array) -> jax.Array:
        return _tile(refs, sizes, seq, head, i * sizes.tokens, state)

    before = load(refs.states, pages.at(refs.read[seq], *at), inside & (q_len > 0)).astype(jnp.float32)
    after = lax.fori_loop(0, (q_len + sizes.tokens - 1) // sizes.tokens, tile, before)
    page = refs.write[seq]
    is_written = (page > 0) & (q_len > 0)
    place = pages.at(jnp.where(is_written, page, pages.count(refs.states)), *at)
    store(refs.states, place, after, inside & is_written)


def _tile(refs: Refs, sizes: Sizes, seq: jax.Array, head: jax.Array, first: jax.Array, state: jax.Array) -> jax.Array:
    """The state [P, N] after a tile of tokens, whose outputs are written."""
    head_dim, state_dim = refs.x.shape[2], refs.b.shape[2]
    group = head // (refs.x.shape[1] // refs.b.shape[1])
    place = first + lax.iota(jnp.int32, sizes.tokens)
    row, column = (lax.iota(jnp.int32, n) for n in state.shape)
    is_real = place < refs.q_lens[seq]
    token = jnp.where(is_real, refs.starts[seq] + place, 0)
    of_x, of_b = is_real[:, None] & (row < head_dim)[None], is_real[:, None] & (column < state_dim)[None]
    x = load(refs.x, (token[:, None], head, row[None]), of_x)
    b, c = (load(y, (token[:, None], group, column[None]), of_b) for y in (refs.b, refs.c))
    dt = load(refs.dt, (token, head), is_real)
    sums = RunningSums.of(dt * refs.a[head])
    weights = sums.decays() * product(c, b.T) * dt[None]
    inside = product(weights.astype(x.dtype), x)
    out = inside + sums.since_start()[:, None] * product(c, state.astype(c.dtype).T)
    out = out + refs.d[head] * x.astype(jnp.float32)
    beyond = jnp.where(is_real, token, refs.x.shape[0])
    store(refs.out, (beyond[:, None], head, row[None]), out, of_x)
    weighed = x.astype(jnp.float32) * (sums.until_end() * dt)[:, None]
    return sums.of_all()[:, None] * state + _exact_product(weighed.T, b)


def _exact_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """float32[m, n] of float32 `x` [m, k] and `y` [k, n] of any float dtype, exact to float32."""
    if y.dtype != jnp.bfloat16:
        return product(x, y.astype(jnp.float32))
    total = jnp.zeros((x.shape[0], y.shape[1]), jnp.float32)
    for _ in range(3):
        part = x.astype(jnp.bfloat16)
        total, x = total + product(part, y), x - part.astype(jnp.float32)
    return total
