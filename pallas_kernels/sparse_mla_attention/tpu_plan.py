"""Static sizes of the TPU kernels' launches.

Flow:    shapes + options -> [LaunchConfig] -> tpu_runs, tpu_picks
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.tpu.latent_blocks import StatePages
from pallas_kernels.tpu.mosaic import LANES

LARGEST_BLOCK = 512  # states


def block_pages(cache: StatePages, most_states: int) -> int:
    """Pages of a block: a power of two whose states are a multiple of 128 and no more than can be seen."""
    states = max(LANES, cache.page_size, min(LARGEST_BLOCK, 1 << (most_states - 1).bit_length()))
    return states // cache.page_size


@dataclass(frozen=True)
class LaunchConfig:
    """One launch over one cache."""

    cache: StatePages
    queries: int  # tokens of a block
    heads: int  # of a token, padded to a power of two
    scale: float
    tokens_per_state: int  # a power of two
    window: int | None  # tokens that a query sees; None: all entries of the compressed cache
    block_pages: int
    finishes: bool  # leaves results, not a state
    return_lse: bool

    @property
    def num_rows(self) -> int:
        """Rows of a block of tokens."""
        return self.queries * self.heads

    @property
    def block_rows(self) -> int:
        """Rows of pages in a block of states."""
        return self.block_pages * self.cache.rows

    @property
    def block_states(self) -> int:
        """States of a block."""
        return self.block_rows * self.cache.places
