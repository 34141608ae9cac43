"""indexer_topk in plain jnp: the specification, and the CPU path.

Streaming and exact: the best entries so far stand before those of the next tile, and the best of both are kept. Entries
come in rising order and a stable choice prefers what stands first, so that equal scores keep the smaller entry.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.latent_entries import EntryFormat
from pallas_kernels.latent_pages import EntryCache
from pallas_kernels.schedule import Batch
from pallas_kernels.token_places import TokenPlaces, over_entries
from pallas_kernels.varying import vary_like


class Best(NamedTuple):
    """The best entries seen so far, best first."""

    score: jax.Array  # float32[..., K], -inf where there is none
    entry: jax.Array  # int32[..., K], -1 where there is none


def best_of(best: Best, score: jax.Array, entry: jax.Array) -> Best:
    """`best` after more entries int32[..., E] of float32[..., E] scores, all larger than those before; -inf: none.

    Places without an entry stay in front of the new ones without a score.
    """
    scores, place = lax.top_k(jnp.concatenate([best.score, score], axis=-1), best.score.shape[-1])
    return Best(scores, jnp.take_along_axis(jnp.concatenate([best.entry, entry], axis=-1), place, axis=-1))


@functools.partial(jax.jit, static_argnames=("topk", "tokens_per_state", "entries", "page_size"))
def indexer_topk(
    q: jax.Array,  # [T, Hi, Di]
    weights: jax.Array,  # [T, Hi]
    pages: tuple[jax.Array, ...],
    block_tables: jax.Array,  # int32[S, P]
    seq_lens: jax.Array,  # int32[S]
    query_start_loc: jax.Array,  # int32[S + 1]
    distribution: jax.Array,  # int32[3]
    *,
    topk: int,
    tokens_per_state: int,
    entries: EntryFormat,
    page_size: int,
) -> jax.Array:
    """int32[T, topk] as `pallas_kernels.indexer_topk.indexer_topk`."""
    num_tokens = q.shape[0]
    seq, pos = TokenPlaces.of_batch(Batch.of_step(seq_lens, query_start_loc, distribution), num_tokens)
    cache = EntryCache.of(pages, entries, q.shape[-1], page_size)

    def body(best: Best, inputs: tuple[jax.Array, ...], entry: jax.Array) -> Best:
        q, weights, seq, counts = inputs
        k = cache.read(cache.slots(block_tables, seq[:, None], entry[None]))
        logits = jnp.einsum("thd,ted->the", q, k, precision=lax.Precision.HIGHEST)
        score = jnp.einsum("th,the->te", weights, jnp.maximum(logits, 0.0), precision=lax.Precision.HIGHEST)
        entry = jnp.broadcast_to(entry, score.shape)
        return best_of(best, jnp.where(entry < counts[:, None], score, -jnp.inf), entry)

    counts = (pos + 1) // tokens_per_state
    inputs = (q.astype(jnp.float32), weights.astype(jnp.float32), seq, counts)
    best = Best(jnp.full((num_tokens, topk), -jnp.inf, jnp.float32), jnp.full((num_tokens, topk), -1, jnp.int32))
    return over_entries(body, vary_like(best, *inputs, *pages, block_tables), inputs, counts).entry
