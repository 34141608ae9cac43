"""compressor_update on GPUs: states written by XLA's scatter, entries pooled in Triton, one program for some numbers.

Flow:    new states -> pages -> [pool_entries] -> entries

Grid (entries, pieces of `_COLUMNS` of their numbers). A program goes over the tokens of its entry, some at a time, with
the running softmax of each number: maximum, weight, sum. It reads of each state what its entry needs, once; with
overlap the halves of a token's state go to two entries. An entry that the step does not complete reads nothing, where
XLA would gather the null page for it: most of a decoding step's.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.compressor_update.reference import biased_states, new_entries
from pallas_kernels.gpu.places import PageNumbers, slabs_of
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.layouts import cdiv
from pallas_kernels.online_softmax import finite
from pallas_kernels.packed_pages import states_of_pages
from pallas_kernels.schedule import Batch
from pallas_kernels.slab_pages import replaced
from pallas_kernels.triton.call import call, load, power_from, store

_COLUMNS = 128  # numbers of an entry, of a program
_TOKENS = 32  # loaded at a time


class Refs(NamedTuple):
    """Arrays as a program sees them."""

    pages: Any  # float32[slabs, numbers], of a page [slots, 2 * coff * D or more]
    block_tables: Any  # int32[S, P]
    seq: Any  # int32[N]
    entry: Any  # int32[N] -1: none
    entries: Any  # float32[N, D]


@functools.partial(jax.jit, static_argnames=("overlap", "page_size", "room"))
def compressor_update(
    kv: jax.Array,  # [T, coff * D]
    scores: jax.Array,  # [T, coff * D]
    pages: tuple[jax.Array, ...],
    block_tables: jax.Array,  # int32[S, P]
    seq_lens: jax.Array,  # int32[S]
    query_start_loc: jax.Array,  # int32[S + 1]
    distribution: jax.Array,  # int32[3]
    slot_mapping: jax.Array,  # int32[T]
    position_bias: jax.Array,  # float32[R, coff * D]
    *,
    overlap: bool,
    page_size: int,
    room: int,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """The fields of `CompressorOutput`, N being `room`."""
    ratio, width = position_bias.shape
    batch = Batch.of_step(seq_lens, query_start_loc, distribution)
    states = biased_states(kv, scores, batch, position_bias)
    array = LatentPages(pages[0], page_size, 2 * width).write(states, slot_mapping, None)
    seq, entry = new_entries(batch, ratio, room)
    dim, states = width // 2 if overlap else width, states_of_pages(array)
    (entries,) = call(
        functools.partial(_pool, ratio, overlap, page_size, PageNumbers.of(states)),
        name="pool_entries",
        grid=(room, cdiv(dim, _COLUMNS)),
        inputs=[slabs_of(states), block_tables, seq, entry],
        outputs=[jax.ShapeDtypeStruct((room, dim), jnp.float32)],
    )
    return entries, jnp.where(entry >= 0, entry * ratio, -1), replaced(pages, 0, array)


def _pool(ratio: int, overlap: bool, page_size: int, places: PageNumbers, *arrays: Any) -> None:
    """Some numbers of an entry."""
    refs = Refs(*arrays)
    dim, num_states = refs.entries.shape[1], ratio * (1 + overlap)
    number, columns = pl.program_id(0), min(_COLUMNS, power_from(dim))
    column = pl.program_id(1) * columns + lax.iota(jnp.int32, columns)
    seq, entry = refs.seq[number], refs.entry[number]
    tokens = min(_TOKENS, power_from(num_states))

    def add(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, weight, total = state
        place = i * tokens + lax.iota(jnp.int32, tokens)
        token = entry * ratio + place - ratio * overlap
        named = (place < num_states) & (token >= 0)
        page = load(refs.block_tables, (seq, jnp.where(named, token // page_size, 0)), named)
        first = jnp.where(place >= ratio, dim, 0)  # of the half for the token's own entry
        slot = jnp.where(named, token % page_size, 0)[:, None]
        inside = named[:, None] & (column < dim)[None]
        kv = load(refs.pages, places.at(page[:, None], slot, first[:, None] + column[None]), inside)
        behind = (dim * (1 + overlap) + first)[:, None] + column[None]
        scores = load(refs.pages, places.at(page[:, None], slot, behind), inside)
        scores = jnp.where(named[:, None], scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=0))
        shrink, weights = jnp.exp(top - finite(new_top)), jnp.exp(scores - finite(new_top)[None])
        weight = weight * shrink + jnp.sum(weights, axis=0)
        return new_top, weight, total * shrink + jnp.sum(weights * kv, axis=0)

    nothing = jnp.zeros(columns, jnp.float32)
    num_tiles = cdiv(num_states, tokens) * jnp.clip(entry + 1, 0, 1)
    _, weight, total = lax.fori_loop(0, num_tiles, add, (nothing - jnp.inf, nothing, nothing))
    pooled = jnp.where(weight == 0, 0.0, total / jnp.where(weight == 0, 1.0, weight))
    store(refs.entries, (number, column), pooled, column < dim)
