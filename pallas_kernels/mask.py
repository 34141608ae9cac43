"""The one mask rule of paged attention, and the pages that it lets a query tile see.

Flow:    options + positions -> [MaskRule] -> masks, loop bounds and prefetch of the reference and of every kernel

A query at position `pos` sees the keys `k <= upper` with `k >= lower` or `k < num_sink_tokens`, where

    lower = max(0, pos - sliding_window + 1, (pos // attention_chunk_size) * attention_chunk_size)
    upper = pos if causal, else seq_len - 1

Sink tokens are static (StreamingLLM), or int32[S] beside the mask, each sequence's own (R-SWA: those of its prompt).
`lower` and `upper` never fall as `pos` grows and `lower <= pos <= upper`; so what the queries of a run of positions
see together is `[lower(first), upper(last)]` and the sink tokens, without holes:

    page     0      1      2      3      4      5      6      7
             sink   -      -      first  ...    last   -      -
    seen     0                    1      2      3                     PageRun(1, first_page=3, num_pages=4)

Every function takes Python ints, numpy arrays or traced arrays (in a Pallas kernel: scalars), broadcast together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

# An int, or an integer array of any shape: one argument each, since callers mix them.
Ints = Any


class PageRun(NamedTuple):
    """Pages that a run of queries sees, numbered 0 ... num_pages - 1: sink pages first, then a contiguous run."""

    num_sink_pages: Ints  # pages before `first_page` that hold sink tokens
    first_page: Ints  # first column of the block table of the contiguous run
    num_pages: Ints  # all pages seen; 0 where nothing is

    def column(self, i: Ints) -> Ints:
        """Column in the block table of the `i`-th page of the run."""
        return jnp.where(i < self.num_sink_pages, i, self.first_page + i - self.num_sink_pages)


@dataclass(frozen=True)
class MaskRule:
    """Static options of the mask."""

    causal: bool = True
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    num_sink_tokens: int = 0
    # Whether each sequence has its own sink tokens: then they come beside the mask, and the number above is 0.
    sinks_by_sequence: bool = False

    @property
    def has_sink_tokens(self) -> bool:
        """Whether there may be keys that all later queries see."""
        return self.num_sink_tokens > 0 or self.sinks_by_sequence

    def sink_end(self, sink_tokens: Ints) -> Ints:
        """How many first keys all later queries see; `sink_tokens`: of their sequences, which other masks leave out."""
        return sink_tokens if self.sinks_by_sequence else self.num_sink_tokens

    def first_seen(self, pos: Ints, sink_tokens: Ints) -> Ints:
        """`lower`, or 0 where it lies no later than the end of the sequence's own sink tokens: nothing is left out."""
        lower = self.lower(pos)
        return jnp.where(lower <= sink_tokens, 0, lower) if self.sinks_by_sequence else lower

    @property
    def sees_all(self) -> bool:
        """Whether every query sees every key, wherever it stands."""
        return not self.causal and self.sliding_window is None and self.attention_chunk_size is None

    def lower(self, pos: Ints) -> Ints:
        """First key seen by a query at `pos`, sink tokens apart."""
        lower = jnp.zeros_like(pos)
        if self.sliding_window is not None:
            lower = jnp.maximum(lower, pos - self.sliding_window + 1)
        if self.attention_chunk_size is not None:
            lower = jnp.maximum(lower, pos // self.attention_chunk_size * self.attention_chunk_size)
        return lower

    def upper(self, pos: Ints, seq_len: Ints) -> Ints:
        """Last key seen by a query at `pos` of a sequence of `seq_len` tokens."""
        return pos if self.causal else seq_len - 1

    def visible(self, key_pos: Ints, first_pos: Ints, last_pos: Ints, seq_len: Ints, sink_tokens: Ints = 0) -> Ints:
        """Whether a key is seen by any query at a position in `[first_pos, last_pos]`."""
        return self.within(key_pos, self.lower(first_pos), self.upper(last_pos, seq_len), sink_tokens)

    def within(self, key_pos: Ints, lower: Ints, upper: Ints, sink_tokens: Ints = 0) -> Ints:
        """Whether a key is seen by a query whose first and last key are `lower` (sink tokens apart) and `upper`."""
        inside = key_pos >= lower
        if self.has_sink_tokens:
            inside = inside | (key_pos < self.sink_end(sink_tokens))
        return inside & (key_pos <= upper)

    def page_run(
        self, first_pos: Ints, last_pos: Ints, seq_len: Ints, page_size: int, sink_tokens: Ints = 0
    ) -> PageRun:
        """Pages that the queries at `[first_pos, last_pos]` see; none where `last_pos < 0`."""
        first_page = self.first_seen(jnp.maximum(first_pos, 0), sink_tokens) // page_size
        end_page = jnp.maximum(self.upper(last_pos, seq_len), -1) // page_size + 1
        num_sink_pages = jnp.minimum(-(-self.sink_end(sink_tokens) // page_size), first_page)
        num_pages = num_sink_pages + jnp.maximum(end_page - first_page, 0)
        return PageRun(num_sink_pages, first_page, jnp.where(last_pos < 0, 0, num_pages))

    def max_pages(self, num_queries: int, num_columns: int, page_size: int) -> int:
        """Most pages that `num_queries` successive queries see, for a block table of `num_columns` columns."""
        if self.sinks_by_sequence:
            return max(1, num_columns)
        bounds = [num_columns]
        sink_pages = -(-self.num_sink_tokens // page_size)
        if self.causal and self.sliding_window is not None:
            bounds.append(sink_pages + (self.sliding_window + num_queries - 3) // page_size + 2)
        if self.causal and self.attention_chunk_size is not None:
            bounds.append(sink_pages + (self.attention_chunk_size + num_queries - 3) // page_size + 2)
        return max(1, min(bounds))
