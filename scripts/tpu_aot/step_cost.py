"""Cycles of an attention kernel's launch over a workload, by the static score of its full and of its masked blocks.

Flow:    BlockScores + lengths -> plan_items, the kernel's own plan -> trips of both loops -> [launch_cycles]

A full block costs its score. The trips of the masked loop cost their bundles, or the cycles of the DMA for the pages
that are left, whichever is more. What the score leaves out is left out here: latencies, and a tile's own start and end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_paged_attention.mask import MaskRule
from pallas_kernels.ragged_paged_attention.schedule import Batch
from pallas_kernels.ragged_paged_attention.tpu_plan import Field, plan_items
from scripts.tpu_aot.score import BlockScore

DECODE = [(length, 1) for length in (1000, 2000, 4000, 8000)]  # (tokens of the sequence, of which new)
TILES = [(700, 700), (4000, 4000), (8000, 512)]  # a short prompt, a long one, a chunk of a longer one


@dataclass(frozen=True)
class LaunchSizes:
    """What `plan_items` needs to know of a launch."""

    mask: MaskRule
    queries: int
    page_size: int
    block: int
    table_stride: int = 0
    tables_in_hbm: bool = False

    @property
    def block_pages(self) -> int:
        """Pages of a KV block."""
        return self.block // self.page_size


def launch_cycles(scores: Sequence[BlockScore], mask: MaskRule, page_size: int) -> float:
    """Cycles of `DECODE`, or of `TILES` where the kernel takes several queries; `scores`: full, then masked."""
    full, masked = scores
    sizes = LaunchSizes(mask, full.queries, page_size, full.block_tokens)
    sequences = DECODE if full.queries == 1 else TILES
    whole, cut, left_pages = trips(sizes, sequences)
    dma_per_page = full.dma_cycles / sizes.block_pages
    return float(whole.sum() * full.cycles + np.maximum(cut * masked.bundles, left_pages * dma_per_page).sum())


def trips(sizes: LaunchSizes, sequences: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int32[items] each: trips of the loop over full blocks, of the masked loop, pages that the latter reads."""
    seq_lens, q_lens = (jnp.asarray(column, jnp.int32) for column in zip(*sequences, strict=True))
    batch = Batch(seq_lens, jnp.cumsum(q_lens) - q_lens, q_lens)
    table, count = plan_items(batch, sizes, int(q_lens.sum()))
    fields = np.asarray(table).reshape(len(Field), -1)[:, : int(count)]
    whole = np.maximum(fields[Field.NUM_FULL] - 1, 0)  # the last full block runs with the masked ones
    return whole, fields[Field.NUM_BLOCKS] - whole, fields[Field.NUM_PAGES] - whole * sizes.block_pages
