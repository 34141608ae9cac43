"""Checks of indexer_topk's arguments: static ones always, values where they are known."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels import attention_checks, checks
from pallas_kernels.latent_entries import EntryFormat
from pallas_kernels.latent_pages import LatentPages, check_entry_pages

OP = "indexer_topk"


def check(
    q: jax.Array,
    weights: jax.Array,
    pages: Any,
    step: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    topk: Any,
    tokens_per_state: Any,
    entries: EntryFormat,
    page_size: int | None,
) -> LatentPages:
    """The pages.

    Raises:
        ValueError: an argument does not fit.
    """
    checks.check_array(OP, "q", q, (None, None, None), "[num_tokens, num_heads, dim]")
    checks.check_floating(OP, "q", q)
    if q.size == 0:
        raise ValueError(f"{OP}: expected at least one token, head and number, got q of shape {q.shape}; pad the batch")
    checks.check_array(OP, "weights", weights, q.shape[:2], "[num_tokens, num_heads] as q")
    checks.check_floating(OP, "weights", weights)
    checks.check_at_least(OP, "topk", topk, 1)
    checks.check_at_least(OP, "tokens_per_state", tokens_per_state, 1)
    latent = check_entry_pages(OP, "pages", pages, q.shape[-1], entries, page_size)
    attention_checks.check_batch(OP, q.shape[0], latent.page_size * tokens_per_state, *step)
    return latent
