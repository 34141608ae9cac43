"""Compiles many cases in a pool of processes and tells what came of each.

Flow:    (chip, case) ... + a release of libtpu -> [compile_all] -> Result ... -> table, JSON
         Results of two releases -> [losses] -> what one does worse
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from scripts.lab.tpu.bundles import Kernel
from scripts.lab.tpu.chips import CHIPS
from scripts.lab.tpu.compiler import Compilation, CompilationError, compile_and_dump
from scripts.lab.tpu.libtpu import Release
from scripts.lab.tpu.score import BlockScore, block_scores
from scripts.lab.tpu.shape_cases import ShapeCase
from scripts.lab.tpu.workers import Workers

Compiler: TypeAlias = Callable[[str, str, list[str]], Compilation]  # chip, op, settings; raises CompilationError
ROW = "{:8} {:4} {:16} {:27} {:26} {:7} {:>6} {:>6} {:>8} {:>6} {:>6} {:>5}"
HEADER = ROW.format(
    "libtpu", "chip", "op", "case", "kernel", "block", "VMEM M", "SMEM K", "bundles", "spills", "share", "s"
)


@dataclass(frozen=True)
class Line:
    """Figures of one kernel, or of one kind of KV block of it."""

    kernel: str
    block: str  # "full" or "masked"; "all": the kernel's bundles, each loop once
    vmem_bytes: int | None
    smem_bytes: int
    bundles: int | None  # None: not dumped
    spills: int | None
    dma_share: float | None  # bundles over the cycles of the DMA


@dataclass(frozen=True)
class Result:
    """What came of one case."""

    libtpu: str  # its version
    chip: str
    case: ShapeCase
    seconds: float
    lines: tuple[Line, ...] = ()
    error: str | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """What names it among others."""
        return (self.libtpu, self.chip, self.case.op, *self.case.settings)

    @property
    def rows(self) -> list[str]:
        """Lines of the table."""
        start = (self.libtpu, self.chip, self.case.op, self.case.label)
        if self.error is not None:
            return [ROW.format(*start, "does not compile", *[""] * 6, f"{self.seconds:.0f}")]
        return [
            ROW.format(
                *start,
                line.kernel,
                line.block,
                "-" if line.vmem_bytes is None else f"{line.vmem_bytes / 2**20:.1f}",
                f"{line.smem_bytes / 1024:.0f}",
                "-" if line.bundles is None else line.bundles,
                "-" if line.spills is None else line.spills,
                "-" if line.dma_share is None else f"{line.dma_share:.2f}",
                f"{self.seconds:.0f}",
            )
            for line in self.lines
        ]


def compile_case(libtpu: str, chip: str, case: ShapeCase, compilers: Iterable[Compiler]) -> Result:
    """Compiles one case by the first of `compilers` that succeeds; its error is that of the last.

    `libtpu`: the version that they have.
    """
    start = time.monotonic()
    error = ""
    for compiler in compilers:
        try:
            compilation = compiler(chip, case.op, list(case.settings))
        except (CompilationError, ValueError) as refused:  # ValueError: dumps that cannot be read
            error = str(refused)
            continue
        found = tuple(_lines(chip, compilation.memory, compilation.kernels))
        problem = _too_large(chip, found) or _copied(compilation.memory)
        return Result(libtpu, chip, case, time.monotonic() - start, found, problem)
    return Result(libtpu, chip, case, time.monotonic() - start, error=error)


def compile_all(
    work: Iterable[tuple[str, ShapeCase]],
    *,
    libtpu: Release,
    jobs: int,
    dumps: bool,
    timeout_s: float,
    on_result: Callable[[Result], object],
) -> None:
    """Compiles all of `work`, `jobs` at a time, with dumps where those end and are asked for.

    `on_result` is called in this thread as each case ends.
    """
    with Workers(jobs, timeout_s, libtpu) as workers, ThreadPoolExecutor(jobs) as pool:
        dumping = partial(compile_and_dump, kernels=".*", timeout_s=timeout_s, libtpu=libtpu)
        compilers = [dumping, workers.compile] if dumps else [workers.compile]
        futures = [pool.submit(compile_case, libtpu.version, *item, compilers) for item in work]
        for future in as_completed(futures):
            on_result(future.result())


def losses(results: Iterable[Result], others: Iterable[Result], margin: float) -> list[str]:
    """Lines on the kernels whose bundles exceed those of another release by more than `margin`, a share.

    Cases, kernels and kinds of blocks that only one of the releases has figures of are passed over.
    """
    known = {
        (*other.key[1:], line.kernel, line.block): (other.libtpu, line) for other in others for line in other.lines
    }
    found = []
    for result in results:
        for line in result.lines:
            libtpu, other = known.get((*result.key[1:], line.kernel, line.block), ("", None))
            if other is None or other.bundles is None or line.bundles is None:
                continue
            if line.bundles > (1 + margin) * other.bundles:
                case = " ".join((*result.key[1:], line.kernel, line.block))
                loss = line.bundles / other.bundles - 1
                found.append(
                    f"{case}: {line.bundles} bundles with libtpu {result.libtpu}, {other.bundles} with {libtpu} "
                    f"({loss:+.0%})"
                )
    return found


def save(path: Path, results: Iterable[Result]) -> None:
    """Writes results as JSON."""
    path.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


def load(path: Path) -> list[Result]:
    """Results that `save` wrote; none where there is no file."""
    if not path.exists():
        return []
    return [_result(data) for data in json.loads(path.read_text())]


def _result(data: dict[str, Any]) -> Result:
    case = data["case"]
    shape = ShapeCase(case["op"], case["label"], tuple(case["settings"]))
    lines = tuple(Line(**line) for line in data["lines"])
    return Result(data["libtpu"], data["chip"], shape, data["seconds"], lines, data["error"])


def _lines(chip: str, memory: dict[str, Any], kernels: list[Kernel]) -> Iterable[Line]:
    dumped = {kernel.name: kernel for kernel in kernels}
    for name, sizes in memory["kernels"].items():
        space = (sizes["vmem_bytes"], sizes["smem_bytes"])
        kernel = dumped.get(name)
        if kernel is None:
            yield Line(name, "all", *space, None, None, None)
            continue
        scores = _scores(chip, kernel, memory["token_bytes"])
        for score in scores:
            yield Line(name, score.kind, *space, score.bundles, score.spill_bundles, round(score.dma_share, 3))
        if not scores:
            yield Line(name, "all", *space, kernel.loop.num_bundles, kernel.loop.num_spills, None)


def _scores(chip: str, kernel: Kernel, token_bytes: int | None) -> list[BlockScore]:
    """The scores of an attention kernel's blocks; none of other kernels."""
    try:
        return [] if token_bytes is None else block_scores(kernel, CHIPS[chip], token_bytes)
    except ValueError:
        return []


def _copied(memory: dict[str, Any]) -> str | None:
    """What says that pages are not changed in place."""
    donated, temporary = memory["donated_bytes"], memory["temp_bytes"]
    if memory["alias_bytes"] < donated:
        return f"expected {donated} bytes updated in place, got {memory['alias_bytes']}"
    if 0 < donated <= temporary:
        return f"expected less temporary bytes than the {donated} of pages, got {temporary}"
    return None


def _too_large(chip: str, lines: Iterable[Line]) -> str | None:
    for line in lines:
        for what, size, limit in (
            ("VMEM", line.vmem_bytes or 0, CHIPS[chip].vmem_bytes),
            ("SMEM", line.smem_bytes, CHIPS[chip].smem_bytes),
        ):
            if size > limit:
                return f"{line.kernel}: expected at most {limit} bytes of {what}, got {size}"
    return None
