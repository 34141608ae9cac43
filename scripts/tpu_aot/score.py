"""Static score of an attention kernel: bundles of a KV block against the time its bytes need.

Flow:    Kernel + chip + bytes of a token -> [block_scores] -> BlockScore of full and of masked blocks

`cycles = max(bundles, bytes / bandwidth * clock)`. Bundles: the loop's own, and those of loops inside times their
trips for a whole block (pages started four at a time, heads not unrolled). Limits: a bundle is a cycle only where
nothing stalls; code that runs only sometimes counts as always; clocks are inferred; latency of the first block, and
what a sequence costs beside its blocks, are left out. So it ranks variants of a kernel; it is not a time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from scripts.tpu_aot.bundles import Kernel, Loop
from scripts.tpu_aot.chips import Chip

_NAME = re.compile(r"rpa_q(\d+)_b(\d+)_p(\d+)_t(\d+)")
_LATENT_NAME = re.compile(r"mla_q(\d+)_h\d+_u(\d+)_b(\d+)_p(\d+)")
_UNROLLED_PAGES = 4  # of ItemTable.start


@dataclass(frozen=True)
class BlockScore:
    """One kind of block of one kernel."""

    kernel: str
    kind: str  # "full": every row sees all of it; "masked"
    queries: int
    block_tokens: int
    bundles: int
    spill_bundles: int  # that fills and spills need at least
    bound: tuple[str, int]  # unit that binds most, spills apart
    num_bytes: int
    dma_cycles: float

    @property
    def cycles(self) -> float:
        """The score."""
        return max(self.bundles, self.dma_cycles)

    @property
    def dma_share(self) -> float:
        """Bundles over the cycles of the DMA: below 1, HBM binds."""
        return self.bundles / self.dma_cycles


def block_scores(kernel: Kernel, chip: Chip, token_bytes: int) -> list[BlockScore]:
    """Scores of a kernel of ragged_paged_attention, full blocks first; of mla_paged_attention those of a step's blocks.

    Raises:
        ValueError: the kernel's name or loops are not those of an attention kernel.
    """
    match, latent = _NAME.fullmatch(kernel.name), _LATENT_NAME.fullmatch(kernel.name)
    loops = [(outer, loop) for outer in kernel.loop.inner for loop in outer.inner if loop.has_matmul]
    if match is None and latent is None:
        raise ValueError(f"expected a kernel called rpa_q*_b*_p*_t* or mla_q*_h*_u*_b*_p*, got {kernel.name!r}")
    if len(loops) != 2:
        raise ValueError(f"{kernel.name}: expected a loop over full blocks and one over masked ones, got {len(loops)}")
    if match is not None:
        queries, block, page, trips = map(int, match.groups())
        bundles = [executed_bundles(loop, block // page, trips) for _, loop in loops]
    else:
        assert latent is not None
        queries, units, block, page = map(int, latent.groups())
        (start, cut), block_pages = _starts(*loops[0]), block // page
        bundles = [
            start + loops[0][1].num_bundles,
            start + executed_bundles(cut, block_pages, 1) + loops[1][1].num_bundles,
        ]
        block *= units
    num_bytes = block * token_bytes
    return [
        BlockScore(
            kernel.name,
            kind,
            queries,
            block,
            count,
            loop.num_spills,
            loop.bound,
            num_bytes,
            chip.dma_cycles(num_bytes),
        )
        for kind, count, (_, loop) in zip(("full", "masked"), bundles, loops, strict=True)
    ]


def _starts(outer: Loop, attends: Loop) -> tuple[int, Loop]:
    """What starts the next step: bundles of `outer` before `attends`, and the loop for steps that are not full."""
    before = [loop for loop in outer.inner if loop.end <= attends.first]
    own = attends.first - outer.first - sum(loop.num_bundles for loop in before)
    return own, max(before, key=lambda loop: loop.num_bundles)


def executed_bundles(loop: Loop, block_pages: int, head_trips: int) -> int:
    """Bundles of one block of `block_pages` pages, loops inside by their trips."""
    total = loop.own_bundles
    for inner in loop.inner:
        if inner.has_matmul:
            trips = head_trips
        elif inner.num_dmas == 1:
            trips = block_pages % _UNROLLED_PAGES
        else:
            trips = block_pages // _UNROLLED_PAGES
        total += trips * executed_bundles(inner, block_pages, head_trips)
    return total
