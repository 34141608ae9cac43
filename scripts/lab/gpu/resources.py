"""What a kernel takes of a multiprocessor, read off the compiler's dumps.

Flow:    ptxas's log, disassembly, Mosaic GPU's list of resources -> [parse_*] -> numbers

Mosaic GPU may have its PTX compiled for linking (jax 0.12 with nvJitLink installed). ptxas then ignores `setmaxnreg`,
which moves registers from the warpgroup that fetches to those that compute, and says so; `ignores_setmaxnreg` tells.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

# Instructions that tell how a kernel works: tensor core, bulk copies in and out, barriers, local memory (spills), ...
INSTRUCTIONS = ("HGMMA", "UTMALDG", "UTMASTG", "SYNCS", "USETMAXREG", "LDG", "STG", "LDS", "STS", "LDL", "STL", "MUFU")


@dataclass(frozen=True)
class Usage:
    """One kernel as ptxas compiled it."""

    kernel: str
    registers: int  # a thread, at launch
    spill_store_bytes: int
    spill_load_bytes: int
    ignores_setmaxnreg: bool


def parse_ptxas(log: str) -> list[Usage]:
    """The kernels of one log of `ptxas -v`."""
    ignores = "'setmaxnreg' ignored" in log
    kernel, spills, found = "", (0, 0), []
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '([^']+)'", line):
            kernel = match[1]
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spills = int(match[1]), int(match[2])
        elif (match := re.search(r"Used (\d+) registers", line)) and kernel:
            found.append(Usage(kernel, int(match[1]), *spills, ignores))
            kernel, spills = "", (0, 0)
    return found


def parse_shared_memory(resources: str) -> int | None:
    """Bytes of shared memory of one thread block, barriers apart; None where the text does not say."""
    match = re.search(r"smem_scratch_bytes=(\d+)", resources)
    return int(match[1]) if match else None


def count_instructions(sass: str) -> dict[str, int]:
    """How often each of `INSTRUCTIONS` stands in a disassembly, with any suffix."""
    pattern = r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9]+)"
    counts = Counter(re.findall(pattern, sass))
    return {name: counts[name] for name in INSTRUCTIONS}


def count_copies(module: str, shape: tuple[int, ...]) -> int:
    """Instructions of a compiled module that make a new array of `shape` out of another: copied, converted, turned."""
    sizes = ",".join(str(size) for size in shape)
    return len(re.findall(rf"= \S+\[{sizes}\]\S* (?:copy|convert|transpose|copy-start)\(", module))
