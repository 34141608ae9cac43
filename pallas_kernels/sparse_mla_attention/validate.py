"""Checks of sparse_mla_attention's arguments: static ones always, values where they are known."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pallas_kernels import attention_checks, checks
from pallas_kernels.latent_entries import EntryFormat
from pallas_kernels.latent_pages import LatentPages, check_entry_pages
from pallas_kernels.sparse_mla_attention.schedule import SparseSchedule

OP = "sparse_mla_attention"


def check_window(
    q: jax.Array, pages: Any, sliding_window: Any, entries: EntryFormat, page_size: int | None
) -> LatentPages:
    """The window's pages.

    Raises:
        ValueError: queries, pages and window do not go together.
    """
    checks.check_array(OP, "q", q, (None, None, None), "[num_tokens, num_q_heads, dim]")
    checks.check_floating(OP, "q", q)
    if q.size == 0:
        raise ValueError(f"{OP}: expected at least one token, head and number, got q of shape {q.shape}; pad the batch")
    checks.check_at_least(OP, "sliding_window", sliding_window, 0)
    return check_entry_pages(OP, "pages", pages, q.shape[-1], entries, page_size)


def check_compressed(
    q: jax.Array,
    pages: Any,
    tables: Any,
    tokens_per_state: Any,
    topk_indices: Any,
    entries: EntryFormat,
    page_size: int | None,
) -> LatentPages | None:
    """The compressed cache's pages, None if there is none.

    Raises:
        ValueError: only a part of what describes the cache is given, or the parts do not fit.
    """
    parts = {"compressed_pages": pages, "compressed_tables": tables, "tokens_per_state": tokens_per_state}
    missing = [name for name, part in parts.items() if part is None]
    if len(missing) == len(parts):
        if topk_indices is not None:
            raise ValueError(f"{OP}: expected topk_indices None without compressed_pages, got indices")
        return None
    if missing:
        raise ValueError(f"{OP}: expected all of {list(parts)} or none, got no {missing[0]}")
    checks.check_at_least(OP, "tokens_per_state", tokens_per_state, 1)
    checks.check_array(OP, "compressed_tables", tables, (None, None), "[num_seqs, pages_per_seq]")
    checks.check_int32(OP, "compressed_tables", tables)
    if topk_indices is not None:
        checks.check_array(OP, "topk_indices", topk_indices, (q.shape[0], None), "[num_tokens, k]")
        checks.check_int32(OP, "topk_indices", topk_indices)
        checks.check_at_least(OP, "k, the columns of topk_indices,", topk_indices.shape[1], 1)
    return check_entry_pages(OP, "compressed_pages", pages, q.shape[-1], entries, page_size)


def check_sees(sliding_window: int, topk_indices: Any) -> None:
    """Raises ValueError where tokens have no window, and nothing names entries for them."""
    if not sliding_window and topk_indices is None:
        raise ValueError(f"{OP}: expected topk_indices where sliding_window is 0, got None")


def check_new_kv(q: jax.Array, new_kv: Any, slot_mapping: Any, latent: LatentPages) -> None:
    """Raises ValueError unless new latents and their slots come together, one per query token."""
    if (new_kv is None) != (slot_mapping is None):
        missing, given = ("slot_mapping", "new_kv") if slot_mapping is None else ("new_kv", "slot_mapping")
        raise ValueError(f"{OP}: expected {missing} along with {given}, got None; pass both or neither")
    if new_kv is None:
        return
    num_tokens, _, dim = q.shape
    checks.check_array(OP, "new_kv", new_kv, (num_tokens, dim), "[num_tokens, dim] as the queries'")
    checks.check_floating(OP, "new_kv", new_kv)
    checks.check_array(OP, "slot_mapping", slot_mapping, (num_tokens,), "[num_tokens]")
    checks.check_int32(OP, "slot_mapping", slot_mapping)
    known = checks.concrete(slot_mapping)
    if known is not None:
        checks.check_slots(OP, known[0], latent.array.shape[0] * latent.page_size)


def check_step(
    q: jax.Array,
    latent: LatentPages,
    compressed: LatentPages | None,
    step: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    compressed_tables: Any,
    tokens_per_state: int | None,
) -> None:
    """Raises ValueError where the arrays that describe the step do not fit each other and both caches."""
    attention_checks.check_batch(OP, q.shape[0], latent.page_size, *step)
    if compressed is None or tokens_per_state is None:
        return
    num_seqs, num_columns = np.shape(compressed_tables)
    if num_seqs != step[0].shape[0] or num_columns < 1:
        raise ValueError(
            f"{OP}: expected compressed_tables of {step[0].shape[0]} rows as block_tables and at least one column, "
            f"got {(num_seqs, num_columns)}"
        )
    known = checks.concrete(step[1], step[3])
    if known is not None:
        most = num_columns * compressed.page_size
        num_entries = known[0][: known[1][2]] // tokens_per_state
        if (num_entries > most).any():
            raise ValueError(f"{OP}: expected at most {most} entries in compressed_tables, got {num_entries.max()}")


def check_sinks(q: jax.Array, sinks: Any) -> None:
    """Raises ValueError unless `sinks` is None or a float per query head."""
    if sinks is not None:
        checks.check_array(OP, "sinks", sinks, (q.shape[1],), "[num_q_heads]")
        checks.check_floating(OP, "sinks", sinks)


def check_schedule(q: jax.Array, schedule: Any, sliding_window: int) -> None:
    """Raises ValueError unless `schedule` is None or planned for as many tokens and this window."""
    if schedule is None:
        return
    if not isinstance(schedule, SparseSchedule):
        raise ValueError(f"{OP}: expected schedule to be what plan() returns, got {type(schedule).__name__}")
    want, got = (q.shape[0], sliding_window), np.shape(schedule.window_slots)
    if got != want:
        raise ValueError(f"{OP}: expected a schedule of {want} (tokens, sliding_window), got {got}; plan it again")
