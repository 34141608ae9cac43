"""Checks that all attention ops share: masks, scales, and the arrays that describe a step.

Static ones always, values where they are known (outside `jit`). `op` is the name that messages begin with.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import numpy as np

from pallas_kernels import checks
from pallas_kernels.mask import MaskRule


def check_mask(op: str, mask: MaskRule) -> None:
    """Raises ValueError for an option that is no mask."""
    if not isinstance(mask.causal, bool):
        raise ValueError(f"{op}: expected causal to be True or False, got {mask.causal!r}")
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(mask, name) is not None:
            checks.check_at_least(op, name, getattr(mask, name), 1)
    checks.check_at_least(op, "num_sink_tokens", mask.num_sink_tokens, 0)


def check_sink_tokens(op: str, mask: MaskRule, sink_tokens: Any, num_seqs: int) -> None:
    """Raises ValueError unless sink tokens are int32[num_seqs] >= 0 where the mask has them by sequence, else None."""
    if not mask.sinks_by_sequence:
        if sink_tokens is not None:
            raise ValueError(f"{op}: expected sink_tokens=None of a mask without sinks_by_sequence, got an array")
        return
    if mask.num_sink_tokens:
        raise ValueError(f"{op}: expected num_sink_tokens=0 beside sinks_by_sequence, got {mask.num_sink_tokens}")
    checks.check_array(op, "num_sink_tokens", sink_tokens, (num_seqs,), "[num_seqs]")
    checks.check_int32(op, "num_sink_tokens", sink_tokens)
    known = checks.concrete(sink_tokens)
    if known is not None and (known[0] < 0).any():
        raise ValueError(f"{op}: expected num_sink_tokens >= 0, got {known[0]}")


def check_scalars(op: str, sm_scale: Any, soft_cap: Any) -> None:
    """Raises ValueError unless the scale is a finite number and the cap None or positive."""
    if not isinstance(sm_scale, numbers.Real) or not math.isfinite(float(sm_scale)):
        raise ValueError(f"{op}: expected sm_scale to be a finite number, got {sm_scale!r}")
    if soft_cap is not None and (not isinstance(soft_cap, numbers.Real) or not 0 < float(soft_cap) < math.inf):
        raise ValueError(f"{op}: expected soft_cap to be None or a finite number > 0, got {soft_cap!r}")


def check_decode(
    op: str, num_tokens: int, query_start_loc: jax.Array, distribution: jax.Array, is_decode: bool
) -> None:
    """Raises ValueError where a step that shall be one in which every sequence decodes is another."""
    if not is_decode:
        return
    num_seqs = query_start_loc.shape[0] - 1
    if num_tokens < num_seqs or num_tokens % num_seqs:
        raise ValueError(
            f"{op}: expected as many tokens as sequences with is_decode=True, or a multiple, got {num_tokens} and "
            f"{num_seqs}"
        )
    known, most = checks.concrete(query_start_loc, distribution), num_tokens // num_seqs
    if known is not None and most > 1:
        starts, ends = known
        if (np.diff(starts[: ends[2] + 1]) > most).any():
            raise ValueError(
                f"{op}: expected at most {most} queries of every sequence with is_decode=True and {num_tokens} tokens, "
                f"got query_start_loc {starts}"
            )
    elif known is not None:
        starts, ends = known
        if ends[0] != ends[2] or (starts[: ends[2] + 1] != np.arange(ends[2] + 1)).any():
            raise ValueError(
                f"{op}: expected one query of every sequence with is_decode=True, got query_start_loc {starts} and "
                f"distribution {ends}"
            )


def check_batch(
    op: str,
    num_tokens: int,
    num_slots_per_page: int,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    distribution: jax.Array,
    *,
    sees_all: bool = False,
) -> None:
    """Raises ValueError where the arrays that describe the step do not fit each other.

    With `sees_all` queries have no place among the keys, and there may be more of them.
    """
    checks.check_array(op, "block_tables", block_tables, (None, None), "[num_seqs, pages_per_seq]")
    num_seqs, num_columns = block_tables.shape
    if num_seqs < 1 or num_columns < 1:
        raise ValueError(f"{op}: expected at least one row and column, got block_tables {block_tables.shape}")
    checks.check_array(op, "seq_lens", seq_lens, (num_seqs,), "[num_seqs]")
    checks.check_sequences(op, num_seqs, query_start_loc, distribution, block_tables=block_tables, seq_lens=seq_lens)
    known = checks.concrete(seq_lens, query_start_loc, distribution)
    if known is not None:
        max_len = num_columns * num_slots_per_page
        q_lens = checks.check_starts(op, num_tokens, num_seqs, *known[1:])
        lens = known[0][: q_lens.size]
        least = np.zeros_like(q_lens) if sees_all else q_lens
        if (lens < least).any() or (lens > max_len).any():
            raise ValueError(f"{op}: expected seq_lens from the query lengths {least} to {max_len}, got {lens}")
