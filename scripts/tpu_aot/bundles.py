"""Reads the compiler's dumps of one kernel: its loops, their bundles, what binds them, spills and DMAs.

Flow:    *-final_bundles.txt + *-per-bundle-utilization.txt -> [read_kernel] -> Kernel: a tree of loops

A bundle is one VLIW instruction: one cycle if nothing stalls. The compiler's files: a line per bundle,

    0x82 LB: >> { %s1 = sld [smem:[#allocation8]]  ;;  %v3 = vadd.f32 %v1, %v2 }

with its address, a tag (LB: first of a loop), one `>` for each loop around it and its operations; and in the other
file a row of numbers per bundle, how often it uses each unit, after a line with the units' names and one with how many
of each there are. A unit's *bound* of a loop: its uses, over how many there are. Bundles say nothing of stalls, and
code that runs only sometimes is counted as if it always ran: figures to compare variants of a kernel by, not times.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:([A-Z]{2})\s*)?:\s*((?:>\s*)*)\{(.*)$")
_DMA_START = re.compile(r"\bdma\.[a-z]+_to_")
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
        return set(re.findall(r"Start region (\d+)", self.text))

    @property
    def targets(self) -> set[str]:
        """Names of the regions that it branches to."""
        return set(re.findall(r"sbr\.rel .*?target = \$region(\d+)", self.text))


@dataclass(frozen=True)
class Loop:
    """A loop of a kernel; the kernel itself is the outermost one."""

    first: int  # number of its first bundle
    end: int  # one after its last
    num_dmas: int  # started, loops inside included
    has_matmul: bool
    units: dict[str, int]  # bundles that each unit needs at least, loops inside included
    inner: tuple[Loop, ...]

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
    """A kernel's name and its outermost loop."""

    name: str
    loop: Loop


def read_bundles(text: str) -> list[Bundle]:
    """The bundles of a listing, in order."""
    bundles: list[Bundle] = []
    for line in text.splitlines():
        match = _BUNDLE.match(line)
        if match is None:
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


def read_kernel(name: str, listing: str, utilization: str) -> Kernel:
    """The kernel of two dumps.

    Raises:
        ValueError: the dumps do not have the same number of bundles, or a loop does not end.
    """
    bundles = read_bundles(listing)
    counts, rows = read_utilization(utilization)
    if len(bundles) != len(rows):
        raise ValueError(f"{name}: expected as many rows of use as bundles, got {len(rows)} and {len(bundles)}")

    def loop(first: int, end: int, depth: int) -> Loop:
        starts = [
            i for i in range(first + (depth > 0), end) if bundles[i].is_loop_start and bundles[i].depth == depth + 1
        ]
        inner = tuple(loop(i, _end_of(bundles, i, end), depth + 1) for i in starts)
        uses = {unit: sum(row[unit] for row in rows[first:end]) for unit in counts}
        text = [bundle.text for bundle in bundles[first:end]]
        return Loop(
            first,
            end,
            num_dmas=sum(len(_DMA_START.findall(operations)) for operations in text),
            has_matmul=any("vmatmul" in operations for operations in text),
            units={unit: math.ceil(use / counts[unit]) for unit, use in uses.items() if use},
            inner=inner,
        )

    return Kernel(name, loop(0, len(bundles), 0))


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
