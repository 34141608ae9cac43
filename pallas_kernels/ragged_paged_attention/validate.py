"""Checks of ragged_paged_attention's arguments: static ones always, values where they are known."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import numpy as np

from pallas_kernels import checks
from pallas_kernels.ragged_paged_attention.mask import MaskRule

OP = "ragged_paged_attention"


def check_mask(mask: MaskRule) -> None:
    """Raises ValueError for an option that is no mask."""
    if not isinstance(mask.causal, bool):
        raise ValueError(f"{OP}: expected causal to be True or False, got {mask.causal!r}")
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(mask, name) is not None:
            checks.check_at_least(OP, name, getattr(mask, name), 1)
    checks.check_at_least(OP, "num_sink_tokens", mask.num_sink_tokens, 0)


def check_scalars(sm_scale: Any, soft_cap: Any, schedule: Any, backend: str) -> None:
    """Raises ValueError unless the scale is a finite number, the cap None or positive, and no schedule is lost."""
    if not isinstance(sm_scale, numbers.Real) or not math.isfinite(float(sm_scale)):
        raise ValueError(f"{OP}: expected sm_scale to be a finite number, got {sm_scale!r}")
    if soft_cap is not None and (not isinstance(soft_cap, numbers.Real) or not 0 < float(soft_cap) < math.inf):
        raise ValueError(f"{OP}: expected soft_cap to be None or a finite number > 0, got {soft_cap!r}")
    if schedule is not None and backend == "reference":
        raise ValueError(
            f"{OP}: expected schedule None, since the reference has no plan(), got {type(schedule).__name__}"
        )


def check_heads(
    q: jax.Array,
    pages: tuple[jax.Array, ...],
    new_kv: tuple[jax.Array, jax.Array] | None,
    num_kv_heads: int | None,
) -> int:
    """Number of KV heads.

    Raises:
        ValueError: q, the pages, `new_kv` and `num_kv_heads` do not go together.
    """
    checks.check_array(OP, "q", q, (None, None, None), "[num_tokens, num_q_heads, head_dim]")
    checks.check_floating(OP, "q", q)
    checks.check_pages(OP, pages)
    if num_kv_heads is None and new_kv is not None and np.ndim(new_kv[0]) == 3:
        num_kv_heads = new_kv[0].shape[1]
    num_kv_heads = checks.resolve_kv_heads(OP, pages, num_kv_heads)
    num_tokens, num_q_heads, head_dim = q.shape
    lanes = pages[0].shape[-1]
    if head_dim > lanes or (len(pages) == 2 and head_dim != lanes):
        raise ValueError(f"{OP}: expected q's head_dim as the K pages' {lanes}, got {head_dim}")
    if num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(f"{OP}: expected a multiple of {num_kv_heads} KV heads as query heads, got {num_q_heads}")
    if num_tokens < 1:
        raise ValueError(f"{OP}: expected at least one query token, got q of shape {q.shape}; pad the batch")
    return num_kv_heads


def check_batch(
    num_tokens: int,
    num_slots_per_page: int,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    distribution: jax.Array,
) -> None:
    """Raises ValueError where the arrays that describe the step do not fit each other."""
    checks.check_array(OP, "block_tables", block_tables, (None, None), "[num_seqs, pages_per_seq]")
    num_seqs, num_columns = block_tables.shape
    if num_seqs < 1 or num_columns < 1:
        raise ValueError(f"{OP}: expected at least one row and column, got block_tables {block_tables.shape}")
    checks.check_array(OP, "seq_lens", seq_lens, (num_seqs,), "[num_seqs]")
    checks.check_array(OP, "query_start_loc", query_start_loc, (num_seqs + 1,), "[num_seqs + 1]")
    checks.check_array(OP, "distribution", distribution, (3,), "[3]")
    named = {
        "block_tables": block_tables,
        "seq_lens": seq_lens,
        "query_start_loc": query_start_loc,
        "distribution": distribution,
    }
    for name, array in named.items():
        checks.check_int32(OP, name, array)
    known = checks.concrete(seq_lens, query_start_loc, distribution)
    if known is not None:
        _check_values(num_tokens, num_columns * num_slots_per_page, *known)


def _check_values(
    num_tokens: int, max_len: int, seq_lens: np.ndarray, starts: np.ndarray, distribution: np.ndarray
) -> None:
    """Raises ValueError where lengths, starts and distribution contradict each other or the shapes."""
    ends = distribution.tolist()
    if not 0 <= ends[0] <= ends[1] <= ends[2] <= seq_lens.size:
        raise ValueError(f"{OP}: expected distribution to rise within [0, {seq_lens.size}], got {ends}")
    starts, seq_lens = starts[: ends[2] + 1], seq_lens[: ends[2]]
    q_lens = np.diff(starts)
    if starts[0] != 0 or (q_lens < 0).any() or starts[-1] > num_tokens:
        raise ValueError(f"{OP}: expected query_start_loc to rise from 0 to at most {num_tokens}, got {starts}")
    if (q_lens[: ends[0]] > 1).any():
        raise ValueError(f"{OP}: expected one query token per decode sequence, got {q_lens[: ends[0]]}")
    if (seq_lens < q_lens).any() or (seq_lens > max_len).any():
        raise ValueError(f"{OP}: expected seq_lens from the query lengths {q_lens} to {max_len}, got {seq_lens}")


def check_per_head(num_q_heads: int, num_kv_heads: int, sinks: Any, k_scale: Any, v_scale: Any) -> None:
    """Raises ValueError where sinks or scales do not fit the heads."""
    if sinks is not None:
        checks.check_array(OP, "sinks", sinks, (num_q_heads,), "[num_q_heads]")
        checks.check_floating(OP, "sinks", sinks)
    checks.check_scale(OP, "k_scale", k_scale, num_kv_heads)
    checks.check_scale(OP, "v_scale", v_scale, num_kv_heads)


def check_new_kv(q: jax.Array, new_kv: Any, slot_mapping: Any) -> None:
    """Raises ValueError unless new KV and its slots come together, one per query token."""
    if (new_kv is None) != (slot_mapping is None):
        missing, given = ("slot_mapping", "new_kv") if slot_mapping is None else ("new_kv", "slot_mapping")
        raise ValueError(f"{OP}: expected {missing} along with {given}, got None; pass both or neither")
    if new_kv is not None:
        if not isinstance(new_kv, tuple | list) or len(new_kv) != 2:
            raise ValueError(f"{OP}: expected new_kv to be a pair (k, v), got {type(new_kv).__name__}")
        shape = (np.shape(q)[0] if np.ndim(q) else None, None, None)
        checks.check_array(OP, "new_kv[0]", new_kv[0], shape, "[num_tokens, num_kv_heads, head_dim]")
