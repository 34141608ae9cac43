"""A step of ragged sequences over pages in random order, and how much of them its queries see.

Flow:    (query tokens, context) of each sequence, mask -> [Step] -> block tables, lengths; tokens and pairs seen
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layouts import cdiv
from pallas_kernels.mask import MaskRule

# (query tokens, tokens of the sequence) of each sequence, one-token ones first.
Rows = tuple[tuple[int, int], ...]

SMALL_ROWS: dict[str, Rows] = {
    "decode": ((1, 37), (1, 1), (1, 24)),
    "decode-long": ((1, 150),),
    "decode-32k": ((1, 150), (1, 90)),
    "prefill": ((24, 24),),
    "mixed": ((1, 20), (1, 33), (9, 30)),
}


def rows_of(kind: str, batch: int = 0, context: int = 0, small: bool = False) -> Rows:
    """The sequences of a kind of step; 0: as many, and as long, as the kind says.

    Raises:
        ValueError: there is no such kind.
    """
    if kind not in SMALL_ROWS:
        raise ValueError(f"expected a kind out of {sorted(SMALL_ROWS)}, got {kind!r}")
    if small:
        return SMALL_ROWS[kind]
    if kind == "prefill":
        return ((context or 8192, context or 8192),) * (batch or 1)
    if kind == "mixed":
        length, count = context or 4096, batch or 64
        prefills = cdiv(count, 16)
        return ((1, length),) * (count - prefills) + ((min(512, length), length),) * prefills
    default_batch, default_context = {"decode": (64, 4096), "decode-long": (1, 131072), "decode-32k": (64, 32768)}[kind]
    return ((1, context or default_context),) * (batch or default_batch)


def words(rows: Rows) -> str:
    """The sizes of a step, short."""
    counts: dict[tuple[int, int], int] = {}
    for row in rows:
        counts[row] = counts.get(row, 0) + 1
    return " + ".join(f"{n}x{q if q > 1 else ''}{'of' if q > 1 else ''}{length}" for (q, length), n in counts.items())


@dataclass(frozen=True)
class Step:
    """Sequences, who sees what, and the tokens of a page."""

    rows: Rows
    mask: MaskRule
    page: int

    @property
    def num_tokens(self) -> int:
        """Query tokens."""
        return sum(q for q, _ in self.rows)

    @property
    def num_columns(self) -> int:
        """Of the block table, at least one."""
        return max(1, *(cdiv(length, self.page) for _, length in self.rows))

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """[first, end) of the tokens that any query of a sequence sees."""
        return tuple((int(lower[0]), length) for (lower, _), (_, length) in zip(self._bounds(), self.rows, strict=True))

    @property
    def tokens_seen(self) -> int:
        """Over the sequences: whose K and V must be read."""
        return sum(end - first for first, end in self.runs)

    @property
    def pairs_seen(self) -> int:
        """(query, key) pairs under the mask."""
        return sum(int((positions - lower + 1).sum()) for lower, positions in self._bounds())

    @property
    def num_pages(self) -> int:
        """Pages that hold a token that is seen, and the null page."""
        return 1 + sum(cdiv(end, self.page) - first // self.page for first, end in self.runs)

    def arrays(self, rng: np.random.Generator) -> tuple[jax.Array, ...]:
        """(block_tables, seq_lens, query_start_loc, distribution); pages that nobody sees are the null page."""
        tables = np.zeros((len(self.rows), self.num_columns), np.int32)
        free = 1 + rng.permutation(self.num_pages - 1)
        for row, (first, end) in enumerate(self.runs):
            columns = slice(first // self.page, cdiv(end, self.page))
            count = columns.stop - columns.start
            tables[row, columns], free = free[:count], free[count:]
        starts = np.cumsum([0, *(q for q, _ in self.rows)])
        num_decode = sum(q == 1 for q, _ in self.rows)
        lengths = [length for _, length in self.rows]
        arrays = (tables, lengths, starts, (num_decode, num_decode, len(self.rows)))
        return tuple(jnp.asarray(array, jnp.int32) for array in arrays)

    def new_slots(self, tables: jax.Array) -> jax.Array:
        """int32[num_tokens]: where the query tokens lie, by the block tables of `arrays`."""
        rows = np.asarray(tables)
        slots = []
        for row, (q_len, length) in zip(rows, self.rows, strict=True):
            positions = np.arange(length - q_len, length)
            slots.append(row[positions // self.page] * self.page + positions % self.page)
        return jnp.asarray(np.concatenate(slots), jnp.int32)

    def _bounds(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(first key seen, position) of the queries of each sequence; the mask is causal and without sink tokens."""
        for q_len, length in self.rows:
            positions = np.arange(length - q_len, length, dtype=np.int64)
            lower = np.zeros_like(positions)
            if self.mask.sliding_window is not None:
                lower = np.maximum(lower, positions - self.mask.sliding_window + 1)
            if self.mask.attention_chunk_size is not None:
                chunk = self.mask.attention_chunk_size
                lower = np.maximum(lower, positions // chunk * chunk)
            yield lower, positions
