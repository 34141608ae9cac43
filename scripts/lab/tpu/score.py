"""Static score of an attention kernel: bundles of a KV block against the time its bytes need.

Flow:    Kernel + chip + bytes of a token -> [block_scores] -> BlockScore of full and of masked blocks

Bundles: the loop's own, and those of loops inside times their trips for a whole block (pages started four at a time,
heads not unrolled); of a masked block all parts, or the code for a whole one. A step lasts what
scripts/lab/tpu/latency.py says of bundles, bytes and a DMA's latency; the kernel's name says how many buffers it has
(`_n`; 2 without), the listing where a step starts a DMA and where it waits. Limits: a bundle is a cycle only where
nothing stalls; code that runs only sometimes counts as always; clocks are inferred and latency is assumed. So it ranks
variants of a kernel; it is not a time. What a sequence costs beside its blocks: scripts/lab/tpu/step_cost.py.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from scripts.lab.tpu.bundles import Kernel, Loop, Skip
from scripts.lab.tpu.chips import Chip
from scripts.lab.tpu.latency import PAIR, Ring

_NAME = re.compile(r"(rpa|mla)((?:_[a-z]\d+)+)")  # such as rpa_q1_b512_p128_t1
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
    ring: Ring = PAIR
    hidden_bundles: int = 0  # work between the start of a block's DMA and the wait for it

    def seconds(self, chip: Chip, latency_s: float) -> float:
        """The score: a step of many, by the model."""
        return self.ring.step_seconds(self.dma_cycles / chip.clock_hz, self.bundles / chip.clock_hz, latency_s)

    @property
    def in_flight_bytes(self) -> int:
        """Bytes under way at most."""
        return self.ring.in_flight_bytes(self.num_bytes)

    @property
    def dma_share(self) -> float:
        """Bundles over the cycles of the DMA: below 1, HBM binds."""
        return self.bundles / self.dma_cycles


@dataclass(frozen=True)
class KernelName:
    """What an attention kernel's name says of it."""

    family: str  # "rpa" or "mla"
    sizes: dict[str, int]  # q: queries, b: slots of a block, p: of a page, t: trips over heads, n: buffers, u: blocks

    @property
    def block_pages(self) -> int:
        """Pages of a block."""
        return self.sizes["b"] // self.sizes["p"]

    @property
    def step_tokens(self) -> int:
        """Slots that a step attends."""
        return self.sizes["b"] * self.sizes.get("u", 1)


def kernel_name(kernel: Kernel) -> KernelName:
    """Read off.

    Raises:
        ValueError: it is not that of an attention kernel.
    """
    match = _NAME.fullmatch(kernel.name)
    sizes = {} if match is None else {part[0]: int(part[1:]) for part in match[2].split("_")[1:]}
    if match is None or not {"q", "b", "p", "t" if match[1] == "rpa" else "u"} <= sizes.keys():
        raise ValueError(f"expected a kernel called rpa_q*_b*_p*_t* or mla_q*_h*_u*_b*_p*, got {kernel.name!r}")
    return KernelName(match[1], sizes)


@dataclass(frozen=True)
class BlockLoops:
    """Where an attention kernel attends its blocks."""

    outer: tuple[Loop, ...]  # the loop over the grid's steps, if there is one, and last the one over items
    full: Loop  # full blocks that start another full one, or all that run without a mask
    other_full: Loop | None  # full blocks that start whatever follows
    masked: Loop


def block_loops(kernel: Kernel) -> BlockLoops:
    """Told apart by their order.

    Raises:
        ValueError: the kernel's loops are not those of an attention kernel.
    """
    outer, inner = [kernel.loop], [loop for loop in kernel.loop.inner if loop.has_matmul]
    while len(inner) == 1:
        outer.append(inner[0])
        inner = [loop for loop in inner[0].inner if loop.has_matmul]
    if len(inner) not in (2, 3) or len(outer) < 2:
        raise ValueError(
            f"{kernel.name}: expected one or two loops over full blocks and one over masked ones, got {len(inner)}"
        )
    return BlockLoops(tuple(outer[1:]), inner[0], inner[1] if len(inner) == 3 else None, inner[-1])


def ring_of(kernel: Kernel) -> tuple[Ring, int]:
    """(the kernel's ring of buffers, bundles of work between the start of a full block's DMA and the wait for it).

    A kernel of two loops starts the block `buffers - 1` later, one of three that which takes the place of its own.
    """
    name, loops = kernel_name(kernel), block_loops(kernel)
    loop = loops.full if name.family == "rpa" else loops.outer[-1]
    step = loop.num_bundles
    buffers = name.sizes.get("n", 2)
    ahead = buffers - (loops.other_full is None)
    distance = 0 if loop.first_start is None or loop.first_wait is None else loop.first_wait - loop.first_start
    return Ring(buffers, starts_between=ahead < buffers and distance < 0), ahead * step + distance


def block_scores(kernel: Kernel, chip: Chip, token_bytes: int) -> list[BlockScore]:
    """Scores of a kernel of ragged_paged_attention, full blocks first; of mla_paged_attention those of a step's blocks.

    Raises:
        ValueError: the kernel's name or loops are not those of an attention kernel.
    """
    name = kernel_name(kernel)
    loops = block_loops(kernel)
    both = loops.full, loops.masked
    if name.family == "rpa":
        bundles = [executed_bundles(loop, name.block_pages, name.sizes["t"]) for loop in both]
    else:
        start, cut = _starts(loops.outer[-1], loops.full)
        bundles = [
            start + loops.full.num_bundles,
            start + executed_bundles(cut, name.block_pages, 1) + loops.masked.num_bundles,
        ]
    num_bytes = name.step_tokens * token_bytes
    ring, hidden = ring_of(kernel)
    return [
        BlockScore(
            kernel.name,
            kind,
            name.sizes["q"],
            name.step_tokens,
            count,
            loop.num_spills,
            loop.bound,
            num_bytes,
            chip.dma_cycles(num_bytes),
            ring,
            hidden,
        )
        for kind, count, loop in zip(("full", "masked"), bundles, both, strict=True)
    ]


def _starts(outer: Loop, attends: Loop) -> tuple[int, Loop]:
    """What starts the next step: bundles of `outer` before `attends`, and the loop for steps that are not full."""
    before = [loop for loop in outer.inner if loop.end <= attends.first]
    own = attends.first - outer.first - sum(loop.num_bundles for loop in before)
    return own, max(before, key=lambda loop: loop.num_bundles)


def executed_bundles(loop: Loop, block_pages: int, head_trips: int, seen: float = 1.0) -> int:
    """Bundles of one block: loops inside by their trips, over `block_pages` pages that are started and over heads.

    `seen`: the share of the block's slots that hold tokens, which tells which choices run.
    """
    total = loop.own_bundles
    for inner in loop.inner:
        total += _trips(inner, block_pages, head_trips) * executed_bundles(inner, block_pages, head_trips)
    return total - sum(_executed_choice(loop, choice, head_trips) for choice in _choices_left_out(loop, seen))


def _trips(inner: Loop, block_pages: int, head_trips: int) -> int:
    if inner.has_matmul:
        return head_trips
    return block_pages % _UNROLLED_PAGES if inner.num_dmas == 1 else block_pages // _UNROLLED_PAGES


def _executed_choice(loop: Loop, choice: Skip, head_trips: int) -> int:
    inner = [other for other in loop.inner if choice.holds(other)]
    more = sum(_trips(other, 0, head_trips) * executed_bundles(other, 0, head_trips) for other in inner)
    return choice.num_bundles - sum(other.num_bundles for other in inner) + more


def _choices_left_out(loop: Loop, seen: float) -> list[Skip]:
    """The choices that do not run.

    Choices with equal products attend equal parts of a block in turn. Of unequal ones a single one runs; each attends
    twice the slots of the one before.
    """
    choices = list(loop.choices)
    if len(choices) < 2:
        return []
    if len({choice.num_products for choice in choices}) == 1:
        return choices[math.ceil(seen * len(choices)) :]
    runs = next(i for i in range(len(choices)) if seen * 2 ** (len(choices) - 1 - i) <= 1)
    return choices[:runs] + choices[runs + 1 :]
