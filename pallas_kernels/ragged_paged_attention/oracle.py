"""What attention must give: token by token in numpy float64, by the words of the contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pallas_kernels.cases.pages import by_token

LARGEST_SINK = float(np.finfo(np.float32).max)  # larger ones count as this


@dataclass(frozen=True)
class Options:
    """Options of `ragged_paged_attention` that change the result, under the same names."""

    sm_scale: float = 0.125
    causal: bool = True
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    num_sink_tokens: int | tuple[int, ...] = 0  # of every sequence, or of each
    soft_cap: float | None = None
    sinks: np.ndarray | None = field(default=None, compare=False)
    k_scale: np.ndarray | float | None = field(default=None, compare=False)
    v_scale: np.ndarray | float | None = field(default=None, compare=False)
    held_by: tuple[int, int] | None = None  # rank, ranks: only its tokens count


def of_sequence(options: Options, seq: int) -> Options:
    """The options of one sequence: with its own sink tokens."""
    if isinstance(options.num_sink_tokens, int):
        return options
    return replace(options, num_sink_tokens=options.num_sink_tokens[seq])


def visible_keys(pos: int, seq_len: int, options: Options) -> list[int]:
    """Positions that a query at `pos` sees: one key after the other, by the words of the contract.

    A query before position 0 sees nothing, unless positions mean nothing.
    """
    keys: list[int] = []
    assert isinstance(options.num_sink_tokens, int)  # of one sequence
    if pos < 0 and (options.causal or options.sliding_window is not None or options.attention_chunk_size is not None):
        return keys
    for k in range(seq_len):
        if options.causal and k > pos:
            continue
        in_window = options.sliding_window is None or k > pos - options.sliding_window
        chunk = options.attention_chunk_size
        in_chunk = chunk is None or k >= pos - pos % chunk
        if (in_window and in_chunk) or k < options.num_sink_tokens:
            keys.append(k)
    return keys


def seen_keys(rows: Sequence[tuple[int, int]], num_rows: int, options: Options) -> list[set[int]]:
    """Positions that any query of each sequence (query length, sequence length) sees; none of padding."""
    seen = [
        {k for pos in range(n - q_len, n) for k in visible_keys(pos, n, of_sequence(options, seq))}
        for seq, (q_len, n) in enumerate(rows)
    ]
    return seen + [set() for _ in range(num_rows - len(rows))]


def unpacked(pages: tuple[np.ndarray, ...], num_kv_heads: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """K and V as float64[pages, page_size, Hkv, D] of either layout."""
    if len(pages) == 2:
        return pages[0].astype(np.float64), pages[1].astype(np.float64)
    rows = by_token(pages[0], num_kv_heads, head_dim).astype(np.float64)
    return (
        np.stack([rows[:, :, 2 * h, :head_dim] for h in range(num_kv_heads)], axis=2),
        np.stack([rows[:, :, 2 * h + 1, :head_dim] for h in range(num_kv_heads)], axis=2),
    )


def attention(
    q: np.ndarray,  # [T, Hq, D]
    k: np.ndarray,  # float64[pages, page_size, Hkv, D]
    v: np.ndarray,  # float64[pages, page_size, Hkv, Dv]
    block_tables: np.ndarray,
    seq_lens: np.ndarray,
    query_start_loc: np.ndarray,
    num_seqs: int,
    options: Options,
) -> tuple[np.ndarray, np.ndarray]:
    """(out float64[T, Hq, Dv], lse float64[T, Hq])."""
    num_tokens, num_q_heads, _ = q.shape
    page_size, num_kv_heads = k.shape[1:3]
    group = num_q_heads // num_kv_heads
    out = np.zeros((num_tokens, num_q_heads, v.shape[-1]))
    lse = np.full((num_tokens, num_q_heads), -np.inf)
    k_scale = np.broadcast_to(1.0 if options.k_scale is None else options.k_scale, (num_kv_heads,))
    v_scale = np.broadcast_to(1.0 if options.v_scale is None else options.v_scale, (num_kv_heads,))
    for s in range(num_seqs):
        start, end = int(query_start_loc[s]), int(query_start_loc[s + 1])
        for t in range(start, end):
            pos = int(seq_lens[s]) - (end - start) + (t - start)
            rank, size = options.held_by or (0, 1)
            seen = visible_keys(pos, int(seq_lens[s]), of_sequence(options, s))
            keys = np.array([k for k in seen if k % size == rank], dtype=np.int64)
            if keys.size == 0:
                continue
            at = (block_tables[s, keys // page_size], keys % page_size)
            for h in range(num_q_heads):
                kv = h // group
                logits = options.sm_scale * (k[at][:, kv] * k_scale[kv]) @ q[t, h].astype(np.float64)
                if options.soft_cap is not None:
                    logits = options.soft_cap * np.tanh(logits / options.soft_cap)
                extra = [] if options.sinks is None else [min(float(options.sinks[h]), LARGEST_SINK)]
                top = max([logits.max(), *extra])
                weights = np.exp(logits - top)
                total = weights.sum() + sum(np.exp(x - top) for x in extra)
                out[t, h] = weights @ (v[at][:, kv] * v_scale[kv]) / total
                lse[t, h] = top + np.log(total)
    return out, lse
