"""Upstream JAX's paged attention kernels for TPU, on the numbers of our case.

Source: jax.experimental.pallas.ops.tpu.{paged_attention, ragged_paged_attention}

They know neither sinks nor chunk masks. `ragged_paged_attention` reads pages [pages, page_size, 2 * heads, D], which
are the tokens of our packed pages without padding; `paged_attention` decodes over K and V pages [heads, pages,
page_size, D].
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cases.case import Arguments, Case
from pallas_kernels.layouts import lane_pieces, tokens_per_row
from pallas_kernels.packed_pages import tokens_of_pages
from pallas_kernels.ragged_paged_attention.cases import AttentionCase
from scripts.lab.bench.platform import Rival

_COMPUTE_BLOCK_TOKENS = 512


def rivals(case: Case) -> Iterator[Rival]:
    """Of attention alone."""
    if isinstance(case, AttentionCase):
        split, decode = functools.partial(split_pages, case), functools.partial(_decode, case)
        yield Rival("jax ragged_paged_attn", functools.partial(_combined, case), functools.partial(_ragged, case))
        yield Rival("jax paged_attention", lambda a: Arguments(split(a.pages), a.rest), decode)


def split_pages(case: AttentionCase, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """(K, V), [heads, pages, page_size, D] each, of packed pages."""
    flat = _rows_of_tokens(case, pages)
    heads = flat[:, :, : 2 * case.kv_heads, : case.head_dim]
    return heads[:, :, 0::2].transpose(2, 0, 1, 3), heads[:, :, 1::2].transpose(2, 0, 1, 3)


def _combined(case: AttentionCase, arguments: Arguments) -> Arguments:
    """The packed pages with K and V of the heads on one axis."""
    flat = _rows_of_tokens(case, arguments.pages)
    return Arguments((flat[:, :, : 2 * case.kv_heads],), arguments.rest)


def _rows_of_tokens(case: AttentionCase, pages: tuple[jax.Array, ...]) -> jax.Array:
    """Packed pages as [pages, page_size, K0 V0 K1 V1 ... and padding, lanes]."""
    (packed,) = pages
    tokens = tokens_per_row(case.kv_heads, packed.shape[3])
    return tokens_of_pages(packed, tokens, lane_pieces(case.head_dim))


def _ragged(case: AttentionCase, pages: Any, rest: Any) -> tuple[Any, tuple[()]]:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    _refuse(case)
    q, (tables, lengths, starts, distribution), *_ = rest
    if q.shape[-1] != pages[0].shape[-1]:
        raise NotImplementedError(f"head dimensions of {pages[0].shape[-1]} alone, got {q.shape[-1]}")
    options = {"sm_scale": case.scale, "sliding_window": case.window or None, "soft_cap": case.soft_cap or None}
    return ragged_paged_attention(q, pages[0], lengths, tables, starts, distribution[2:], **options), ()


def _decode(case: AttentionCase, pages: Any, rest: Any) -> tuple[Any, tuple[()]]:
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    _refuse(case)
    if case.window:
        raise NotImplementedError("no windows")
    if case.tokens != case.seqs:
        raise NotImplementedError("decode alone")
    q, (tables, lengths, *_), *_ = rest
    out = paged_attention(
        q * jnp.asarray(case.scale, q.dtype),
        *pages,
        lengths,
        tables,
        attn_logits_soft_cap=case.soft_cap or None,
        pages_per_compute_block=compute_block_pages(tables.shape[1], case.page),
    )
    return out, ()


def compute_block_pages(num_columns: int, page: int) -> int:
    """Pages of a block of it: the most up to 512 tokens that divide the table."""
    most = max(1, _COMPUTE_BLOCK_TOKENS // page)
    return max(count for count in range(1, most + 1) if num_columns % count == 0)


def _refuse(case: AttentionCase) -> None:
    if case.sinks or case.chunk:
        raise NotImplementedError("no sinks or chunks")
