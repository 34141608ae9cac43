"""Reads the compiler's dumps of one kernel: its loops, their bundles, what binds them, spills and DMAs.

Flow:    *-final_bundles.txt + *-per-bundle-utilization.txt -> [read_kernel] -> Kernel: a tree of loops

A bundle is one VLIW instruction: one cycle if nothing stalls. The compiler's files: a line per bundle,

    0x82 LB: >> { %s1 = sld [smem:[#allocation8]]  ;;  %v3 = vadd.f32 %v1, %v2 }

with its address, a tag (LB: first of a loop), one `>` for each loop around it and its operations, which may go on in
the next lines; and in the other file a row of numbers per bundle, how often it uses each unit, after a line with the
units' names and one with how many of each there are. A unit's *bound* of a loop: its uses, over how many there are.
Bundles say nothing of stalls, and a loop counts code that runs only sometimes as if it always ran (`skips` tell of
it): figures to compare variants of a kernel by, not times.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:([A-Z]{2})\s*)?:\s*((?:>\s*)*)\{(.*)$")
_DMA_START = re.compile(r"\bdma\.[a-z]+_to_")
_DMA_WAIT = re.compile(r"\bdma\.done\b")
_DELAY_SLOTS = 4
_SPILLS = ("VLOAD:FILL", "VSTORE:SPILL")


@dataclass(frozen=True)
class Bundle:
    """One line of the listing."""

    is_loop_start: bool
    depth: int  # loops around it
    text: str

    @property
    def regions(self) -> set[str]:
        """Names of the regions that start here: where branches go."""
        return set(re.findall(r"Start(?:/End empty)? region (\d+)", self.text))

    @property
    def targets(self) -> set[str]:
        """Names of the regions that it branches to."""
        return set(re.findall(r"sbr\.rel .*?target = \$region(\d+)", self.text))


@dataclass(frozen=True)
class Region:
    """Bundles that a branch repeats or skips."""

    first: int  # number of its first bundle
    end: int  # one after its last
    is_loop: bool

    @property
    def num_bundles(self) -> int:
        """Bundles of one pass."""
        return self.end - self.first

    def holds(self, other: Region) -> bool:
        """Whether `other` lies in it and is smaller."""
        return self.first <= other.first and other.end <= self.end and other.num_bundles < self.num_bundles


@dataclass(frozen=True)
class Skip:
    """Bundles of a loop that a branch of the loop may skip."""

    first: int
    end: int
    num_dmas: int  # started
    num_products: int = 0  # instructions of the matrix unit

    @property
    def num_bundles(self) -> int:
        """Loops inside by one trip."""
        return self.end - self.first

    def holds(self, other: Skip | Loop) -> bool:
        """Whether `other` lies in it and is another."""
        return self.first <= other.first and other.end <= self.end and other is not self


@dataclass(frozen=True)
class Loop:
    """A loop of a kernel; the kernel itself is the outermost one."""

    first: int  # number of its first bundle
    end: int  # one after its last
    num_dmas: int  # started, loops inside included
    has_matmul: bool
    units: dict[str, int]  # bundles that each unit needs at least, loops inside included
    inner: tuple[Loop, ...]
    skips: tuple[Skip, ...] = ()  # outermost ones without products, those of `inner` apart
    choices: tuple[Skip, ...] = ()  # outermost ones with products
    first_start: int | None = None  # number of the first bundle that starts a DMA
    first_wait: int | None = None  # of the first that waits for one

    @property
    def num_bundles(self) -> int:
        """One trip, with one trip of each loop inside."""
        return self.end - self.first

    @property
    def own_bundles(self) -> int:
        """Without the loops inside."""
        return self.num_bundles - sum(loop.num_bundles for loop in self.inner)

    @property
    def num_spills(self) -> int:
        """Bundles that fills and spills need at least."""
        return sum(self.units.get(name, 0) for name in _SPILLS)

    @property
    def bound(self) -> tuple[str, int]:
        """(unit, bundles) that binds most, spills apart."""
        units = {name: count for name, count in self.units.items() if name not in _SPILLS}
        name = max(units, key=lambda name: units[name])
        return name, units[name]


@dataclass(frozen=True)
class Kernel:
    """A kernel's name, its outermost loop and its listing."""

    name: str
    loop: Loop
    bundles: tuple[Bundle, ...] = ()


def read_bundles(text: str) -> list[Bundle]:
    """The bundles of a listing, in order."""
    bundles: list[Bundle] = []
    for line in text.splitlines():
        match = _BUNDLE.match(line)
        if match is None:
            if bundles and not line.startswith(("//", "==")):
                bundles[-1] = replace(bundles[-1], text=f"{bundles[-1].text} {line.strip()}")
            continue
        tag, marks, operations = match.groups()
        depth = marks.count(">")
        if bundles and not operations.split("/*")[0].strip(" }"):  # the delay slots of a branch print no depth
            depth = max(depth, bundles[-1].depth)
        bundles.append(Bundle(tag == "LB", depth, operations))
    return bundles


def read_utilization(text: str) -> tuple[dict[str, int], list[dict[str, int]]]:
    """(how many there are of each unit, uses of each unit by each bundle)."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("==")]
    names = [name.strip() for name in lines[0].split(",")]
    counts, *rows = [dict(zip(names, map(int, line.split()), strict=True)) for line in lines[1:]]
    return counts, rows


def regions(bundles: Sequence[Bundle]) -> list[Region]:
    """What branches repeat or skip, in order, the larger of two that start together first."""
    starts: dict[str, int] = {}
    for i, bundle in enumerate(bundles):
        for number in bundle.regions:
            starts.setdefault(number, i)
    found = set()
    for i, bundle in enumerate(bundles):
        after = min(i + 1 + _DELAY_SLOTS, len(bundles))
        for target in bundle.targets & starts.keys():
            start = starts[target]
            found.add(Region(start, after, True) if start <= i else Region(after, start, False))
    return sorted(found, key=lambda region: (region.first, -region.end))


def read_kernel(name: str, listing: str, utilization: str) -> Kernel:
    """The kernel of two dumps.

    Raises:
        ValueError: the dumps do not have the same number of bundles, or a loop does not end.
    """
    bundles = read_bundles(listing)
    counts, rows = read_utilization(utilization)
    if len(bundles) != len(rows):
        raise ValueError(f"{name}: expected as many rows of use as bundles, got {len(rows)} and {len(bundles)}")

    texts = [bundle.text for bundle in bundles]
    products = [text.count(" vmatmul.") for text in texts]
    skipped = [region for region in regions(bundles) if not region.is_loop]

    def dmas(first: int, end: int) -> int:
        return sum(len(_DMA_START.findall(text)) for text in texts[first:end])

    def skips(first: int, end: int, inner: tuple[Loop, ...], *, with_products: bool) -> tuple[Skip, ...]:
        """A region begins after its branch's delay slots; one whose branch is before the loop skips the loop itself."""
        own = [r for r in skipped if first <= r.first - 1 - _DELAY_SLOTS and r.end <= end]
        own = [r for r in own if not any(i.first <= r.first < i.end and r.end <= i.end for i in inner)]
        found = [Skip(r.first, r.end, dmas(r.first, r.end), sum(products[r.first : r.end])) for r in own]
        found = [skip for skip in found if bool(skip.num_products) == with_products]
        return tuple(skip for skip in found if not any(other.holds(skip) for other in found))

    def first_of(pattern: re.Pattern[str], first: int, end: int) -> int | None:
        return next((i for i in range(first, end) if pattern.search(texts[i])), None)

    def loop(first: int, end: int, depth: int) -> Loop:
        starts = [
            i for i in range(first + (depth > 0), end) if bundles[i].is_loop_start and bundles[i].depth == depth + 1
        ]
        inner = tuple(loop(i, _end_of(bundles, i, end), depth + 1) for i in starts)
        uses = {unit: sum(row[unit] for row in rows[first:end]) for unit in counts}
        return Loop(
            first,
            end,
            num_dmas=dmas(first, end),
            has_matmul=any(products[first:end]),
            units={unit: math.ceil(use / counts[unit]) for unit, use in uses.items() if use},
            inner=inner,
            skips=skips(first, end, inner, with_products=False),
            choices=skips(first, end, inner, with_products=True),
            first_start=first_of(_DMA_START, first, end),
            first_wait=first_of(_DMA_WAIT, first, end),
        )

    return Kernel(name, loop(0, len(bundles), 0), tuple(bundles))


def _end_of(bundles: list[Bundle], first: int, limit: int) -> int:
    """One after the last bundle of the loop that starts at `first`: the delay slots of the branch back there."""
    regions = bundles[first].regions
    branches = (i for i in range(first, limit) if bundles[i].targets & regions)
    back = next(branches, None)
    if back is None:
        raise ValueError(f"expected a branch back to the loop at bundle {first}, got none")
    return min(limit, back + 1 + _DELAY_SLOTS)


def read_dumps(folder: Path, pattern: str) -> list[Kernel]:
    """The kernels of a dump folder whose names match `pattern`, in order of names."""
    kernels = []
    for listing in sorted(folder.glob("*-final_bundles.txt")):
        match = re.fullmatch(r"\d+-(.*?)(?:\.\d+)?-\d+-final_bundles\.txt", listing.name)
        if match is None or not re.fullmatch(pattern, match[1]):
            continue
        prefix = re.sub(r"-\d+-final_bundles\.txt$", "", listing.name)
        (use,) = (p for p in folder.glob("*per-bundle-utilization.txt") if p.name.startswith(prefix + "-"))
        kernels.append(read_kernel(match[1], listing.read_text(), use.read_text()))
    return kernels
