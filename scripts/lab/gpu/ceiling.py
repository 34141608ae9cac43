"""What a kernel's inner loop costs a multiprocessor, read off the disassembly: the ceiling that it cannot pass.

Flow:    disassembly -> [loops_of] -> one loop per KV block -> [Ceiling.of] -> cycles by resource, TFLOP/s, what binds

A multiprocessor has four schedulers; a warpgroup has a warp with each, and every scheduler issues one instruction a
cycle. Cycles of one trip through the loop, of all warpgroups of a thread block, of which there is one a multiprocessor:

    tensor    64 x n x 16 products of 16-bit numbers: n / 2 (4,096 flops a cycle, 989 TFLOP/s at 1.83 GHz)
    issue     instructions of a warp, times warpgroups, with those of the warpgroup that only fetches
    exp       8 a `MUFU` instruction of a warp: 16 results a cycle and multiprocessor
    shared    128 bytes a cycle: operands of products, the copies that fill them, loads and stores
    memory    K and V at the card's bandwidth; only where nothing else on the card reads them

`overlapped` takes all of these to go on at once. `in step` is the other end, where all warpgroups multiply, then all
make their softmax. `by turns` is two warpgroups that take turns with the tensor cores, or one that makes scores while
others add values: one warpgroup's own chain of products and all else may then bind. `LATENCY` is in the last two. In no
figure are the first and last block of a tile and keys that the mask hides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from scripts.lab.gpu.target import Card

CLOCK_HZ = 1.7e9  # under load
FLOPS_A_CYCLE = 4096
SHARED_BYTES_A_CYCLE = 128
CYCLES_A_MUFU = 8
LATENCY = 400  # cycles a block that a warpgroup waits for shuffles, barriers and the end of products: an estimate
# Warpgroups that run each kind of loop with products, the kind with the most products first.
WARPGROUPS = {"rpa_decode": (1,), "rpa_prefill": (2,), "mla_": (1, 2), "sparse_mla_": (1, 2)}
READ_ONCE = ("rpa_decode", "mla_")  # kernels whose K and V come from memory, not from a cache
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*[A-Za-z0-9_.]*)(.*)")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_PRODUCT = re.compile(r"[HIQ]GMMA\.64x(\d+)x(\d+)\.")


@dataclass(frozen=True)
class Loop:
    """Instructions between a label and the last branch back to it."""

    instructions: tuple[tuple[str, str], ...]  # (name with suffixes, operands)

    def count(self, name: str) -> int:
        """Instructions whose first word is `name`."""
        return sum(found.split(".")[0] == name for found, _ in self.instructions)

    @property
    def executed(self) -> float:
        """Instructions that a warp executes: of those between copies a quarter, where its warpgroup's warps share them.

        They do where fewer barriers of the warpgroup than copies stand in the loop.
        """
        copies = [at for at, (name, _) in enumerate(self.instructions) if name.startswith("UTMALDG")]
        if len(copies) <= self.count("BAR"):
            return len(self.instructions)
        return len(self.instructions) - 0.75 * (copies[-1] - copies[0])

    @property
    def products(self) -> list[tuple[int, bool]]:
        """(columns, whether both operands stand in shared memory) of each matrix product."""
        found = [(_PRODUCT.match(name), operands) for name, operands in self.instructions]
        return [(int(match[1]), not re.match(r"\s*R\d+, R\d", operands)) for match, operands in found if match]

    @property
    def tensor(self) -> float:
        """Cycles of one warpgroup's products."""
        return sum(columns for columns, _ in self.products) / 2

    @property
    def exp(self) -> float:
        """Cycles of one warpgroup's exponentials and the like."""
        return float(self.count("MUFU") * CYCLES_A_MUFU)

    @property
    def operand_bytes(self) -> int:
        """Bytes of shared memory that the products read: 16 numbers of each column, and of 64 rows."""
        return sum(32 * columns + 2048 * in_shared for columns, in_shared in self.products)

    @property
    def accessed_bytes(self) -> int:
        """Bytes that a warpgroup's own loads and stores of shared memory move."""
        widths = [
            int(match[1]) if (match := re.search(r"\.(64|128)\b", name)) else 32
            for name, _ in self.instructions
            if name.split(".")[0] in ("LDS", "STS")
        ]
        return sum(widths) // 8 * 128


def loops_of(sass: str) -> list[Loop]:
    """The innermost loops with matrix products, and innermost loops that start bulk copies, in order."""
    labels, lines = {}, []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(lines)
        elif found := _LINE.search(line):
            lines.append((found[2], found[3]))
    ends: dict[int, int] = {}
    for at, (name, operands) in enumerate(lines):
        target = re.search(r"\((\.L_x_\d+)\)", operands) if name.startswith("BRA") else None
        if target and labels.get(target[1], at + 1) <= at:
            ends[labels[target[1]]] = at + 1
    spans = [(start, end) for start, end in ends.items() if _works(lines[start:end])]
    inner = [(a, b) for a, b in spans if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in spans)]
    return [Loop(tuple(lines[start:end])) for start, end in sorted(inner)]


def _kinds(loops: list[Loop]) -> list[Loop]:
    """The shortest loop of each kind, a kind having products of the same columns; the most products first."""
    kinds: dict[frozenset[int], Loop] = {}
    for loop in sorted(loops, key=lambda loop: (-len(loop.products), len(loop.instructions))):
        if loop.products:
            kinds.setdefault(frozenset(columns for columns, _ in loop.products), loop)
    return list(kinds.values())


def _num_scores(loop: Loop) -> int:
    """Products of scores in a loop: those of as few columns as any."""
    fewest = min(columns for columns, _ in loop.products)
    return sum(columns == fewest for columns, _ in loop.products)


def _works(lines: Iterable[tuple[str, str]]) -> bool:
    return any(_PRODUCT.match(name) or name.startswith("UTMALDG") for name, _ in lines)


class Part(NamedTuple):
    """What some warpgroups of a thread block do for one KV block, in cycles of one of them."""

    num_warpgroups: int
    tensor: float
    rest: float  # all but products


@dataclass(frozen=True)
class Ceiling:
    """Cycles of a multiprocessor for one KV block."""

    instructions: int  # a warp of those that make scores
    tensor: float
    issue: float
    exp: float
    shared: float
    memory: float
    num_bytes: int  # fetched
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, kernel: str, sass: str, card: Card, page_bytes: int) -> Ceiling | None:
        """The ceiling of the shortest loops with all products, where no mask is applied; None for a kernel without one.

        `page_bytes` is the size of a number in pages.
        """
        counts = next((counts for start, counts in WARPGROUPS.items() if kernel.startswith(start)), ())
        loops = loops_of(sass)
        kinds = _kinds(loops)[: len(counts)]
        if not counts or len(kinds) < len(counts):
            return None
        work = list(zip(counts, kinds, strict=True))
        fetch_issue = max((loop.executed for loop in loops if not loop.products), default=0.0)
        products = [product for _, loop in work for product in loop.products]
        if kernel.startswith(("mla_", "sparse_mla_")):  # a latent is key and value: fetched for the scores
            products = kinds[0].products[: _num_scores(kinds[0])]
        num_bytes = sum(32 * n for n, _ in products) * page_bytes // 2
        read = sum(n * (loop.operand_bytes + loop.accessed_bytes) for n, loop in work)
        bytes_a_cycle = card.bytes_per_s / card.num_sms / CLOCK_HZ
        return cls(
            instructions=round(kinds[0].executed),
            tensor=sum(n * loop.tensor for n, loop in work),
            issue=sum(n * loop.executed for n, loop in work) + fetch_issue,
            exp=sum(n * loop.exp for n, loop in work),
            shared=(read + num_bytes) / SHARED_BYTES_A_CYCLE,
            memory=num_bytes / bytes_a_cycle if kernel.startswith(READ_ONCE) else 0.0,
            num_bytes=num_bytes,
            parts=tuple(Part(n, loop.tensor, max(loop.executed, loop.exp)) for n, loop in work),
        )

    @property
    def by_resource(self) -> dict[str, float]:
        """Cycles of each resource."""
        return {name: getattr(self, name) for name in ("tensor", "issue", "exp", "shared", "memory")}

    @property
    def binds(self) -> str:
        """The resource with the most cycles."""
        return max(self.by_resource, key=self.by_resource.__getitem__)

    @property
    def overlapped(self) -> float:
        """Cycles where all goes on at once."""
        return max(self.by_resource.values())

    @property
    def in_step(self) -> float:
        """Cycles where no softmax overlaps a product."""
        return max(self.overlapped, self.tensor + sum(part.num_warpgroups * part.rest for part in self.parts) + LATENCY)

    @property
    def by_turns(self) -> float:
        """Cycles where some warpgroups use the tensor cores while others do all else."""
        return max(self.overlapped, *(part.tensor + part.rest + LATENCY for part in self.parts))

    def tflops(self, cycles: float, card: Card) -> float:
        """TFLOP/s of a card whose blocks take so many cycles."""
        return self.tensor * FLOPS_A_CYCLE / cycles * CLOCK_HZ * card.num_sms / 1e12

    def tb_per_s(self, cycles: float, card: Card) -> float:
        """TB/s of K and V."""
        return self.num_bytes / cycles * CLOCK_HZ * card.num_sms / 1e12

    def as_record(self, card: Card) -> dict[str, Any]:
        """For the table."""
        ends = {"overlapped": self.overlapped, "by turns": self.by_turns, "in step": self.in_step}
        return {
            "instructions": self.instructions,
            **{name: round(cycles) for name, cycles in self.by_resource.items()},
            "bytes": self.num_bytes,
            "binds": self.binds,
            **{f"TFLOP/s {name}": round(self.tflops(cycles, card)) for name, cycles in ends.items()},
            **{f"TB/s {name}": round(self.tb_per_s(cycles, card), 2) for name, cycles in ends.items()},
        }
