"""The indexer's scores in Triton: one program for the queries of a tile and a block of entries.

Flow:    query tiles, index keys by block table -> [score_tiles] -> a score for every query and entry

Grid (query tiles, blocks of entries). A program reads its keys once and each query's heads after the other: logits stay
in registers. What crosses memory is keys once a query tile, queries once a block of entries, and the scores.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gpu.places import PageNumbers, slabs_of
from pallas_kernels.latent_entries import EntryFormat, IndexFp8, Plain
from pallas_kernels.layouts import cdiv
from pallas_kernels.slab_pages import SlabArray
from pallas_kernels.triton.call import (
    LEAST,
    call,
    e4m3,
    load,
    numbers,
    power_from,
    product,
    reason_of_pages,
    store,
)

BLOCK = 128  # entries of a program


class Entries(NamedTuple):
    """Index keys behind block tables."""

    pages: jax.Array | SlabArray  # [pages, slots, width or more]
    block_tables: jax.Array  # int32[S, P]
    page_size: int
    entries: EntryFormat


class Refs(NamedTuple):
    """Arrays as a program sees them."""

    q: Any  # [T, Hi, Di] in the dtype of the products
    weights: Any  # float32[T, Hi]
    pages: Any  # [slabs, numbers]
    block_tables: Any
    seq: Any  # int32[C]
    token: Any  # int32[C] first token of each tile
    counts: Any  # int32[C, n] entries of each query
    most: Any  # int32[C] the most of them
    scores: Any  # float32[C, n, blocks of entries]


def reason_not_supported(entries: EntryFormat, pages: jax.Array | SlabArray) -> str | None:
    """What of a call the kernel cannot do, in words; None if it can do it all."""
    if not isinstance(entries, Plain | IndexFp8):
        return f"the kernel in Triton has no entries {entries}"
    return reason_of_pages((pages,))


def score_tiles(
    q: jax.Array,  # [T, Hi, Di] in the dtype of the products
    weights: jax.Array,  # [T, Hi]
    keys: Entries,
    seq: jax.Array,  # int32[C]
    token: jax.Array,  # int32[C] first token of each tile
    counts: jax.Array,  # int32[C, n] entries of each query
) -> jax.Array:
    """float32[C, n, blocks of entries], -inf where a query has no such entry."""
    num_blocks = cdiv(keys.block_tables.shape[1] * keys.page_size, BLOCK)
    step = (seq, token, counts, counts.max(axis=1))
    (scores,) = call(
        functools.partial(_run, keys.page_size, keys.entries, PageNumbers.of(keys.pages)),
        name="score_tiles",
        grid=(seq.shape[0], num_blocks),
        inputs=[q, weights.astype(jnp.float32), slabs_of(keys.pages), keys.block_tables, *step],
        outputs=[jax.ShapeDtypeStruct((*counts.shape, num_blocks * BLOCK), jnp.float32)],
        num_warps=8 if q.dtype.itemsize > 2 else 4,
    )
    return scores


def _run(page_size: int, entries: EntryFormat, places: PageNumbers, *arrays: Any) -> None:
    """The entries of a block, for each query of a tile."""
    refs = Refs(*arrays)
    tile, first = pl.program_id(0), pl.program_id(1) * BLOCK
    num_tokens, num_heads, dim = refs.q.shape
    entry = first + lax.iota(jnp.int32, BLOCK)
    head, column = (lax.iota(jnp.int32, max(LEAST, power_from(n))) for n in (num_heads, dim))
    keys, scale = _keys(refs, page_size, entries, places, tile, entry, column)
    num_queries = refs.counts.shape[1]

    def score(i: jax.Array, carry: jax.Array) -> jax.Array:
        token = jnp.minimum(refs.token[tile] + i, num_tokens - 1)
        inside = (head < num_heads)[:, None] & (column < dim)[None]
        q = load(refs.q, (token, head[:, None], column[None]), inside)
        weight = load(refs.weights, (token, head), head < num_heads)
        logits = jnp.maximum(product(q, keys.T), 0.0)
        total = jnp.sum(jnp.where((head < num_heads)[:, None], weight[:, None] * logits, 0.0), axis=0) * scale
        store(refs.scores, (tile, i, entry), jnp.where(entry < refs.counts[tile, i], total, -jnp.inf))
        return carry

    def nothing(i: jax.Array, carry: jax.Array) -> jax.Array:
        store(refs.scores, (tile, i, entry), jnp.full(BLOCK, -jnp.inf, jnp.float32))
        return carry

    num_scored = num_queries * jnp.clip(refs.most[tile] - first, 0, 1)
    lax.fori_loop(0, num_scored, score, jnp.int32(0))
    lax.fori_loop(num_scored, num_queries, nothing, jnp.int32(0))


def _keys(
    refs: Refs,
    page_size: int,
    entries: EntryFormat,
    places: PageNumbers,
    tile: jax.Array,
    entry: jax.Array,
    column: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """(keys [BLOCK, Di] in the dtype of the queries, their scales float32[BLOCK]); 0 where no query has the entry."""
    dim = refs.q.shape[2]
    known = entry < refs.most[tile]
    page = load(refs.block_tables, (refs.seq[tile], jnp.where(known, entry // page_size, 0)), known)
    slot = entry % page_size
    inside = known[:, None] & (column < dim)[None]
    rows = load(refs.pages, places.at(page[:, None], slot[:, None], column[None]), inside)
    if isinstance(entries, Plain):
        return numbers(rows, refs.q.dtype), jnp.ones(BLOCK, jnp.float32)
    bits = jnp.zeros(BLOCK, jnp.int32)
    for byte in range(4):
        part = load(refs.pages, places.at(page, slot, dim + byte), known).astype(jnp.int32)
        bits = bits | ((part & 0xFF) << (8 * byte))
    return e4m3(rows.astype(jnp.int16)).astype(refs.q.dtype), lax.bitcast_convert_type(bits, jnp.float32)
