"""Listings as the TPU compiler prints them, of kernels of nothing but loops, skipped regions and a few operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from scripts.lab.tpu.bundles import Kernel, read_kernel

Part: TypeAlias = "int | str | Loop | Skip"  # so many empty bundles; an operation in a bundle of its own
PRODUCT = "%1 = vmatmul.f32 %2"
START = "%1 = dma.hbm_to_vmem [thread:$0] %2"
WAIT = "%1 = dma.done.wait [#allocation1], 3"
STORE = "%1 = vst [vmem:%2] sm:$0xff %3"


class Loop(tuple[Part, ...]):
    """Parts that a branch at their end repeats: five bundles more, the branch and its delay slots."""


class Skip(tuple[Part, ...]):
    """Parts that a branch before them may skip: five bundles more, which are not the region's."""


def loop(*parts: Part) -> Loop:
    return Loop(parts)


def skip(*parts: Part) -> Skip:
    return Skip(parts)


def kernel(name: str, *parts: Part) -> Kernel:
    """What the reader makes of such a listing, whose every bundle uses the vector ALU once."""
    printer = _Printer()
    printer.add(parts, 0)
    printer.bundle("", 0)
    lines = [f"{i:#x} {tag:>3}: {'> ' * depth}{{ {text} }}" for i, (tag, depth, text) in enumerate(printer.bundles)]
    use = "== use\nVALU, SALU\n4 2\n" + "1 0\n" * len(lines)
    return read_kernel(name, "\n".join(lines), use)


class _Printer:
    def __init__(self) -> None:
        self.bundles: list[tuple[str, int, str]] = []  # tag, depth, operations
        self._num_regions = 0
        self._starts: list[str] = []  # regions that start at the next bundle
        self._tag = ""

    def bundle(self, text: str, depth: int) -> None:
        starts = " :: ".join(f"Start region {number}" for number in self._starts)
        self.bundles.append((self._tag, depth, f"{text} /* {starts} */" if starts else text))
        self._starts, self._tag = [], ""

    def add(self, parts: Sequence[Part], depth: int) -> None:
        for part in parts:
            if isinstance(part, Loop):
                region = self._region()
                self._starts.append(region)
                self._tag = "LB"
                self.add(part, depth + 1)
                self._branch(region, depth + 1)
            elif isinstance(part, Skip):
                region = self._region()
                self._branch(region, depth)
                self.add(part, depth)
                self._starts.append(region)
            elif isinstance(part, str):
                self.bundle(part, depth)
            else:
                for _ in range(part):
                    self.bundle("%1 = nop", depth)

    def _branch(self, region: str, depth: int) -> None:
        self.bundle(f"%9 = sbr.rel (%p1) target = $region{region}", depth)
        for _ in range(4):
            self.bundle("%1 = nop", depth)

    def _region(self) -> str:
        self._num_regions += 1
        return str(self._num_regions)
