"""Pages and sequences of a generation loop that never leaves the device: allocate, free and fork inside a jitted step.

Flow:    PageState, tokens wanted per sequence -> [alloc] -> PageState, slot of each new token
Source:  what levanter's `PageTable` keeps (page ids per sequence, a reference count per page), without its loops

Every call is cumulative sums, comparisons and scatters over whole arrays: no loop over pages or sequences. Free pages
are taken in the order of their ids. A page that several sequences share is never written: `fork` gives the new sequence
a page of its own for the last partial one and says what to copy.

Axis names: S sequences, P pages of a sequence, N pages.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

INVALID = -1


class PageState(NamedTuple):
    """A pytree of arrays; every call gives a new one."""

    page_indices: jax.Array  # int32[S, P] ids, -1 beyond a sequence's pages
    ref_counts: jax.Array  # int32[N] sequences that hold the page
    seq_lens: jax.Array  # int32[S] tokens, 0 of a sequence that is not in use

    @property
    def num_free(self) -> jax.Array:
        """Pages that no sequence holds."""
        return jnp.sum(self.ref_counts == 0)


class Allocation(NamedTuple):
    """What `alloc` did."""

    state: PageState
    ok: jax.Array  # bool[S] whether the sequence got its tokens; one that did not is as it was
    new_pages: jax.Array  # int32[S, P] the pages that it got, at their columns, -1 elsewhere


class Fork(NamedTuple):
    """What `fork` did."""

    state: PageState
    ok: jax.Array  # bool[]
    copy_from: jax.Array  # int32[] the page to copy before the next write, -1: none
    copy_to: jax.Array  # int32[]


def init(num_pages: int, max_seqs: int, pages_per_seq: int) -> PageState:
    """No sequence has a page."""
    return PageState(
        jnp.full((max_seqs, pages_per_seq), INVALID, jnp.int32),
        jnp.zeros(num_pages, jnp.int32),
        jnp.zeros(max_seqs, jnp.int32),
    )


def alloc(state: PageState, num_tokens: jax.Array, *, page_size: int) -> Allocation:  # num_tokens int32[S] >= 0
    """Room for `num_tokens[s]` more tokens of every sequence, in the order of sequences while there are pages.

    A sequence gets all of its tokens or none. One that does not fit (too few pages left, or more than P) does not keep
    later, smaller ones from fitting: pages that it would have taken count for it only among those before a failure, so
    later ones are judged as if it had got them.
    """
    tables, counts, lengths = state
    columns = jnp.arange(tables.shape[1], dtype=jnp.int32)
    has = _num_pages(lengths, page_size)
    wants = _num_pages(lengths + num_tokens, page_size)
    fits = wants <= tables.shape[1]
    need = jnp.where(fits, wants - has, 0)
    ends = jnp.cumsum(need, dtype=jnp.int32)
    is_free = counts == 0
    ok = fits & (ends <= jnp.sum(is_free))
    is_new = ok[:, None] & (columns >= has[:, None]) & (columns < wants[:, None])
    rank = (ends - need - has)[:, None] + columns  # place of a new page among the free ones
    pages = _by_rank(is_free)
    ids = pages.at[jnp.where(is_new, rank, 0)].get(mode="clip")
    new_pages = jnp.where(is_new, ids, INVALID)
    counts = counts.at[jnp.where(is_new, ids, counts.shape[0])].add(1, mode="drop")
    lengths = jnp.where(ok, lengths + num_tokens, lengths)
    return Allocation(PageState(jnp.where(is_new, ids, tables), counts, lengths), ok, new_pages)


def free(state: PageState, is_done: jax.Array) -> PageState:  # bool[S]
    """Sequences that `is_done` hold no page; a page that nobody holds is free."""
    tables, counts, lengths = state
    held = is_done[:, None] & (tables != INVALID)
    counts = counts.at[jnp.where(held, tables, counts.shape[0])].add(-1, mode="drop")
    return PageState(jnp.where(is_done[:, None], INVALID, tables), counts, jnp.where(is_done, 0, lengths))


def fork(state: PageState, source: jax.Array, target: jax.Array, *, page_size: int) -> Fork:  # int32[] each
    """Sequence `target` starts with the tokens of `source`: whole pages shared, the last partial one its own.

    Nothing is changed, and `ok` is false, where `target` is in use or there is no page for the partial one.
    """
    tables, counts, lengths = state
    length = lengths[source]
    full = length // page_size
    partial = (length % page_size != 0).astype(jnp.int32)
    is_free = counts == 0
    ok = (lengths[target] == 0) & (partial <= jnp.sum(is_free))
    own = jnp.argmax(is_free).astype(jnp.int32)
    columns = jnp.arange(tables.shape[1], dtype=jnp.int32)
    shared = jnp.where(columns < full, tables[source], INVALID)
    is_own = (columns == full) & (partial == 1)
    row = jnp.where(is_own, own, shared)
    held = ok & (row != INVALID)
    counts = counts.at[jnp.where(held, row, counts.shape[0])].add(1, mode="drop")
    tables = tables.at[target].set(jnp.where(ok, row, tables[target]))
    lengths = lengths.at[target].set(jnp.where(ok, length, lengths[target]))
    copies = ok & (partial == 1)
    last = state.page_indices[source, jnp.minimum(full, tables.shape[1] - 1)]
    moved = (jnp.where(copies, page, INVALID) for page in (last, own))
    return Fork(PageState(tables, counts, lengths), ok, *moved)


def new_token_dests(
    state: PageState,  # after `alloc`
    num_tokens: jax.Array,  # int32[S] of the step, each among the sequence's last
    *,
    page_size: int,
    max_tokens: int,
) -> tuple[jax.Array, jax.Array]:  # int32[max_tokens], int32[S + 1]
    """(slot of each of the step's tokens, sequence by sequence, -1 beyond them; where each sequence's begin)."""
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(num_tokens, dtype=jnp.int32)])
    token = jnp.arange(max_tokens, dtype=jnp.int32)
    seq = jnp.sum(token[:, None] >= starts[None, 1:], axis=1)  # sequences that end before the token
    seq = jnp.minimum(seq, num_tokens.shape[0] - 1)
    place = state.seq_lens[seq] - num_tokens[seq] + token - starts[seq]
    page = state.page_indices.at[seq, place // page_size].get(mode="clip")
    return jnp.where(token < starts[-1], page * page_size + place % page_size, INVALID), starts


def _num_pages(lengths: jax.Array, page_size: int) -> jax.Array:
    return -(-lengths // page_size)


def _by_rank(is_free: jax.Array) -> jax.Array:  # bool[N] -> int32[N]
    """Ids of the free pages in ascending order, then anything."""
    size = is_free.shape[0]
    rank = jnp.cumsum(is_free, dtype=jnp.int32) - 1
    ids = jnp.arange(size, dtype=jnp.int32)
    return jnp.zeros(size, jnp.int32).at[jnp.where(is_free, rank, size)].set(ids, mode="drop")
