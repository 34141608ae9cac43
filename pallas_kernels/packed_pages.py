"""Tokens of TPU pages taken out of their rows of words, and put back, for arrays of jax and numpy alike.

Flow:    pages [n, rows of tokens, words * pieces, packing, 128] <-> [n, tokens, numbers a lane, pieces * 128]
Source:  the packed layouts of `pallas_kernels.layouts`

A word of 32 bits holds `packing` numbers, `packing / tokens` of each token that shares it. Row w * pieces + p has piece
p of the lanes of word w.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layouts import TPU_LANES, lane_pieces

Array = TypeVar("Array", jax.Array, np.ndarray)


def kv_rows(k: jax.Array, v: jax.Array, count: int) -> jax.Array:  # [n, num_kv_heads, head_dim] each
    """[n, count, pieces * 128]: rows K0, V0, K1, V1, ... of each token, and zeros."""
    n, num_kv_heads, head_dim = k.shape
    rows = jnp.stack([k, v], axis=2).reshape(n, 2 * num_kv_heads, head_dim)
    padding = [(0, 0), (0, count - 2 * num_kv_heads), (0, lane_pieces(head_dim) * TPU_LANES - head_dim)]
    return jnp.pad(rows, padding)


def tokens_of_pages(pages: Array, tokens: int, pieces: int) -> Array:
    """[n, slots, m, pieces * 128] of pages [n, slots / tokens, words * pieces, packing, 128].

    `m` = words * packing / tokens.
    """
    n, rows, _, packing, lanes = pages.shape
    split = pages.reshape(n, rows, -1, pieces, tokens, packing // tokens, lanes)
    return split.transpose(0, 1, 4, 2, 5, 3, 6).reshape(n, rows * tokens, -1, pieces * lanes)


def pages_of_tokens(rows: Array, tokens: int, packing: int) -> Array:
    """What `tokens_of_pages` was given: pages with `packing` numbers a word, `tokens` tokens a row."""
    n, slots, _, lanes = rows.shape
    split = rows.reshape(n, slots // tokens, tokens, -1, packing // tokens, lanes // TPU_LANES, TPU_LANES)
    return split.transpose(0, 1, 3, 5, 2, 4, 6).reshape(n, slots // tokens, -1, packing, TPU_LANES)


def states_of_pages(pages: Array) -> Array:
    """[n, states, numbers] of latent pages of either layout, padding included."""
    if pages.ndim == 3:
        return pages
    return tokens_of_pages(pages, pages.shape[3], pages.shape[2])[:, :, 0]


def pages_of_states(states: Array, packing: int) -> Array:
    """Packed latent pages of [n, states, pieces * 128]; `packing` divides the states."""
    return pages_of_tokens(states[:, :, None], packing, packing)
