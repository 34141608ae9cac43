"""What an attention kernel's launch over a workload costs, by its listing and its own plan.

Flow:    Kernel + lengths -> plan_items, the kernel's own plan -> blocks of each loop -> [launch_work] -> Work

An item costs what the loop over items has beside its blocks, without what only the first item runs, and its share of
what the loop over the grid's steps has beside items. A block costs its loop's bundles: where that starts pages by
loops, by those of the block that it starts, of the launch's first blocks after its last ones, as in a long launch; and
where it attends parts of a block or chooses code by their number, by its own pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np

from pallas_kernels.mask import MaskRule
from pallas_kernels.schedule import Batch
from pallas_kernels.tpu.item_plan import Field, num_fields, plan_items
from scripts.lab.tpu.bundles import Kernel
from scripts.lab.tpu.latency import Work
from scripts.lab.tpu.score import BlockLoops, block_loops, executed_bundles, kernel_name, ring_of

_STEP_ITEMS = 8  # of a step of the grid of a decode launch that has a loop over items inside

Sequences: TypeAlias = Sequence[tuple[int, int]]  # (tokens of the sequence, of which new)

# Workloads, each launched by itself.
DECODE: tuple[Sequences, ...] = tuple([(length, 1)] for length in (256, 1000, 2000, 4000, 8000))
TILES: tuple[Sequences, ...] = ([(700, 700), (4000, 4000), (8000, 512)],)  # a short prompt, a long one, a chunk


@dataclass(frozen=True)
class LaunchSizes:
    """What `plan_items` needs to know of a launch."""

    mask: MaskRule
    queries: int
    page_size: int
    block: int
    table_stride: int = 0
    tables_in_hbm: bool = False
    context_size: int | None = None

    @property
    def block_pages(self) -> int:
        """Pages of a KV block."""
        return self.block // self.page_size


def workloads(kernel: Kernel) -> tuple[Sequences, ...]:
    """`DECODE`, or `TILES` where the kernel takes several queries."""
    return DECODE if kernel_name(kernel).sizes["q"] == 1 else TILES


def launch_work(kernel: Kernel, mask: MaskRule, token_bytes: int, sequences: Sequences) -> Work:
    """The work of a launch; `token_bytes`: K and V of a token in HBM.

    Raises:
        ValueError: the kernel's name or loops are not those of ragged_paged_attention.
    """
    name, loops = kernel_name(kernel).sizes, block_loops(kernel)
    ring, _ = ring_of(kernel)
    sizes = LaunchSizes(mask, name["q"], name["p"], name["b"])
    items = items_of(sizes, sequences)
    pages = np.concatenate([item.pages(sizes.block_pages) for item in items])
    # A kernel of two loops starts the next block before it attends its own, one of three the block after the ring's.
    ahead = ring.buffers - (loops.other_full is None)
    blocks = zip(pages.tolist(), np.roll(pages, -ahead).tolist(), strict=True)
    bundles = len(items) * item_bundles(loops)
    for item in items:
        if loops.other_full is None:
            trips = [(loops.full, max(item.num_full - 1, 0)), (loops.masked, item.num_blocks)]
        else:
            inside = max(item.num_full - ring.buffers, 0)
            trips = [(loops.full, inside), (loops.other_full, item.num_full), (loops.masked, item.num_blocks)]
        first = 0
        for loop, end in trips:
            for own, started in itertools.islice(blocks, max(end - first, 0)):
                bundles += executed_bundles(loop, started, name["t"], own / sizes.block_pages)
            first = end
    return Work(bundles, int(pages.sum()) * sizes.page_size * token_bytes, len(pages), ring)


def item_bundles(loops: BlockLoops) -> float:
    """Bundles of an item beside its blocks, without what only the first item runs to start its DMAs."""
    *grid, items = loops.outer
    own = items.num_bundles - sum(loop.num_bundles for loop in (loops.full, loops.other_full, loops.masked) if loop)
    own -= max(
        (skip.num_bundles for skip in items.skips if skip.num_dmas and skip.end <= loops.full.first + 1), default=0
    )
    for step in grid:
        first = [skip.num_bundles for skip in step.skips if skip.num_dmas and skip.end <= items.first + 1]
        own += (step.num_bundles - items.num_bundles - max(first, default=0)) / _STEP_ITEMS
    return own


@dataclass(frozen=True)
class Item:
    """What the plan says of one item."""

    num_full: int
    num_blocks: int
    num_pages: int

    def pages(self, block_pages: int) -> list[int]:
        """Pages of its blocks in the order they run; the last block has what is left."""
        left = self.num_pages - (self.num_blocks - 1) * block_pages
        return [block_pages] * (self.num_blocks - 1) + [left] * (self.num_blocks > 0)


def items_of(sizes: LaunchSizes, sequences: Sequences) -> list[Item]:
    """The items of a launch."""
    seq_lens, q_lens = (jnp.asarray(column, jnp.int32) for column in zip(*sequences, strict=True))
    batch = Batch(seq_lens, jnp.cumsum(q_lens) - q_lens, q_lens)
    table, count = plan_items(batch, sizes, int(q_lens.sum()))
    fields = np.asarray(table).reshape(num_fields(sizes), -1)[:, : int(count)]
    columns = (fields[field].tolist() for field in (Field.NUM_FULL, Field.NUM_BLOCKS, Field.NUM_PAGES))
    return [Item(*item) for item in zip(*columns, strict=True)]
