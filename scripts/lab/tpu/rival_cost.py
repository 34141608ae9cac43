"""What the attention kernels of tpu-inference cost, by their listings.

Flow:    Kernel of a rival -> [decode_work, prefill_bundles] -> Work, bundles: figures to set beside step_cost.py's

Their kernels name their sizes. Loops are counted by executed trips; regions that a branch skips, where the schedule
tells that they run only at a sequence's first or last block or only for the write of new KV, by how often that is.
Counted neither here nor for ours: stalls, and scalars that are spilled to HBM and awaited (`blocking_spills`).

    rpa_v3   RPAd-p_PAGE-bq_*_*-bkv_BLOCK_PART    a loop over blocks, inside it one over parts of a block; two buffers
    batched  RPAd-pPAGE-bSEQS-qQUERIES-kBLOCK     a loop whose step attends a block of each of SEQS sequences; three
    stacked  the same name                        as batched, a sequence's blocks side by side in a step; two
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from scripts.lab.tpu.bundles import Kernel, Region, regions
from scripts.lab.tpu.latency import Ring, Work

_PRODUCT = "vmatmul"
_STORE = " vst "
_BUFFERS = {"rpa_v3": 2, "batched": 3, "stacked": 2}


class Schedule:
    """A kernel's listing with what its branches repeat and skip."""

    def __init__(self, kernel: Kernel) -> None:
        self.name = kernel.name
        self._texts = [bundle.text for bundle in kernel.bundles]
        self._regions = regions(kernel.bundles)

    def count(self, region: Region, pattern: str) -> int:
        """Operations that match, of one pass."""
        return sum(len(re.findall(pattern, text)) for text in self._texts[region.first : region.end])

    def loops(self, within: Region | None = None) -> list[Region]:
        """Loops with products, the largest first."""
        found = [r for r in self._regions if r.is_loop and (within is None or within.holds(r))]
        return sorted((r for r in found if self.count(r, _PRODUCT)), key=lambda region: -region.num_bundles)

    def skips(self, within: Region) -> list[Region]:
        """Regions inside that a branch may skip, in order."""
        return [r for r in self._regions if not r.is_loop and within.holds(r)]

    def products(self, within: Region) -> list[int]:
        """Numbers of the bundles with products."""
        return [i for i in range(within.first, within.end) if _PRODUCT in self._texts[i]]

    def blocking_spills(self, within: Region) -> int:
        """Scalars that a step moves between scalar memory and HBM and waits for."""
        return self.count(within, r"dma\.(hbm_to_smem|smem_to_hbm)")


@dataclass(frozen=True)
class Sizes:
    """What a rival's name says."""

    queries: int
    block: int  # tokens of KV
    part: int  # of a block that a loop inside attends
    seqs: int = 1  # blocks of a step


def sizes_of(name: str) -> Sizes:
    """The sizes that a kernel's name says.

    Raises:
        ValueError: the name is not that of a rival.
    """
    v3 = re.fullmatch(r"RPA\w-p_\d+-bq_(\d+)_\d+-bkv_(\d+)_(\d+).*", name)
    if v3 is not None:
        return Sizes(*map(int, v3.groups()))
    grid = re.fullmatch(r"RPA\w-p\d+-b(\d+)-q(\d+)-k(\d+).*", name)
    if grid is None:
        raise ValueError(f"expected a kernel called RPA*-p_*-bq_*-bkv_* or RPA*-p*-b*-q*-k*, got {name!r}")
    seqs, queries, block = map(int, grid.groups())
    return Sizes(queries, block, block, seqs)


def decode_work(rival: str, kernel: Kernel, token_bytes: int, tokens: int) -> Work:
    """The work of a sequence of `tokens` tokens among many equal ones."""
    schedule, sizes = Schedule(kernel), sizes_of(kernel.name)
    blocks = -(-tokens // sizes.block)
    bundles = _DECODE[rival](schedule, sizes, tokens)
    return Work(bundles, tokens * token_bytes, blocks / sizes.seqs, Ring(_BUFFERS[rival]))


def prefill_bundles(rival: str, kernel: Kernel, tokens: int) -> float:
    """Bundles of a fresh prompt of `tokens` tokens: the blocks that tiles of its queries see, and each tile's own."""
    schedule, sizes = Schedule(kernel), sizes_of(kernel.name)
    loops = schedule.loops()
    if rival == "rpa_v3":
        part = loops[-1]
        block, tile = part.num_bundles, loops[0].num_bundles - part.num_bundles
    else:
        step = loops[0]
        last = schedule.products(step)[-1]
        ends = [r for r in schedule.skips(step) if r.first >= last - 8 and schedule.count(r, _STORE) > 100]
        emit = sum(region.num_bundles for region in _outermost(ends))
        block, tile = (step.num_bundles - emit) / sizes.seqs, emit / sizes.seqs
    seen = [min(first + sizes.queries, tokens) for first in range(0, tokens, sizes.queries)]
    return sum(-(-end // sizes.part) * block + tile for end in seen)


def blocking_spills(kernel: Kernel) -> int:
    """The spills of a step that it waits for."""
    schedule = Schedule(kernel)
    return schedule.blocking_spills(schedule.loops()[0])


def _decode_v3(schedule: Schedule, sizes: Sizes, tokens: int) -> float:
    """A sequence: blocks, each of its parts; the first sequence's start is left out, the write of new KV runs once."""
    outer, blocks_loop, part = schedule.loops()[:3]
    before = [r for r in schedule.skips(outer) if r.end <= blocks_loop.first + 2 and not schedule.count(r, _PRODUCT)]
    first = _largest(r for r in before if schedule.count(r, "hbm_to_vmem"))
    inside = [r for r in schedule.skips(blocks_loop) if r.end <= part.first + 2]
    write = _largest(r for r in inside if schedule.count(r, "vmem_to_hbm"))
    blocks = -(-tokens // sizes.block)
    trips = sum(-(-min(sizes.block, tokens - i * sizes.block) // sizes.part) for i in range(blocks))
    step = blocks_loop.num_bundles - part.num_bundles - write
    return outer.num_bundles - first - blocks_loop.num_bundles + blocks * step + trips * part.num_bundles + write


def _decode_batched(schedule: Schedule, sizes: Sizes, tokens: int) -> float:
    """Each step attends a block of each of its sequences."""
    return schedule.loops()[0].num_bundles * -(-tokens // sizes.block) / sizes.seqs


def _decode_stacked(schedule: Schedule, sizes: Sizes, tokens: int) -> float:
    """Blocks of sequences are packed densely into steps.

    What joins a sequence's new KV runs once for it; what reduces the blocks of a step, where a step has several of a
    sequence; what carries its state to the next step, where it has several steps; what gives results, once.
    """
    step = schedule.loops()[0]
    products = schedule.products(step)
    skips = _outermost(r for r in schedule.skips(step) if not schedule.count(r, _PRODUCT))

    def stores(region: Region) -> int:
        return schedule.count(region, _STORE)

    starts = [r for r in skips if r.end <= products[0] + 64 and stores(r) >= 4]
    stitch = [r for r in starts if not schedule.count(r, r"dma\.(general|hbm_to_vmem)")][-sizes.seqs :]
    after = [r for r in skips if r.first >= products[-1] - 64 and stores(r) and not schedule.count(r, "vmem_to_hbm")]
    reduce, rest = after[: sizes.seqs - 1], after[sizes.seqs - 1 :]
    if len(rest) < 2 or not stitch or not reduce:
        raise ValueError(f"{schedule.name}: expected regions that stitch, reduce, merge and emit, got {len(after)}")
    merge, save, emit = rest[0], rest[1:-1], rest[-1]
    base = step.num_bundles - sum(r.num_bundles for r in (*stitch, *after))
    blocks = -(-tokens // sizes.block)
    steps = blocks / sizes.seqs
    reductions = _mean(reduce) if blocks < sizes.seqs else reduce[0].num_bundles
    reductions *= max(1.0, steps) if blocks > 1 else 0
    carries = max(0.0, steps - 1) * (merge.num_bundles + _mean(save))
    return steps * base + _mean(stitch) + reductions + carries + min(1.0, steps) * emit.num_bundles


_DECODE: dict[str, Callable[[Schedule, Sizes, int], float]] = {
    "rpa_v3": _decode_v3,
    "batched": _decode_batched,
    "stacked": _decode_stacked,
}


def _outermost(found: Iterable[Region]) -> list[Region]:
    """The regions that do not begin in an earlier one."""
    kept: list[Region] = []
    for region in found:
        if not kept or region.first >= kept[-1].end:
            kept.append(region)
    return kept


def _largest(found: Iterable[Region]) -> int:
    """Bundles of the largest; 0: there is none."""
    return max((region.num_bundles for region in found), default=0)


def _mean(found: list[Region]) -> float:
    return sum(region.num_bundles for region in found) / max(len(found), 1)
