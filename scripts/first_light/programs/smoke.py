"""Each kernel of an op once, at a small size, next to the reference: python -m scripts.first_light.programs.smoke OP

One case of each kind that the op's benchmark has, by the kernel for Hopper, and by what other cards run: one in Triton,
else vectorised XLA. With --dry-run kernels are interpreted on CPU, one case alone.
"""

from __future__ import annotations

import functools
import os
import sys

os.environ.setdefault("NPROC", str(max(8, os.cpu_count() or 1)))  # threads of the interpreter

import jax

from pallas_kernels.cases.case import Case
from pallas_kernels.cases.compare import excess
from scripts.bench_gpu import GPU
from scripts.first_light.programs.answer import answer
from scripts.lab.bench import driver
from scripts.lab.bench.case import BenchCase, Sizes
from scripts.lab.bench.measure import dry_run

_OTHERS = "triton"  # the backend of other cards


def kinds(op: str) -> list[BenchCase]:
    """The first case of each kind."""
    found: dict[str, BenchCase] = {}
    for case in driver.all_cases([op], Sizes("gpu", 16)):
        found.setdefault(case.kind, case)
    return list(found.values())


def compared(case: Case, backend: str) -> float | str:
    """How far the kernel is from the reference, in tolerances; or why there is no kernel."""
    outputs = []
    for name in ("reference", backend):
        arguments = case.arguments(0)
        try:
            outputs.append(jax.jit(functools.partial(case.call, name))(*arguments))
        except NotImplementedError as error:
            return str(error)
    return excess(outputs[1], outputs[0])


def found_of(op: str, is_dry: bool) -> dict[str, float | str]:
    """By case and backend, as `compared`."""
    cases = kinds(op)[:1] if is_dry else kinds(op)
    found: dict[str, float | str] = {f"{case.name}, {_OTHERS}": compared(case.small, _OTHERS) for case in cases}
    if is_dry:
        row = next(dry_run(cases[0], GPU))
        return found | {row.name: row.note if row.excess is None else row.excess}
    return found | {case.name: compared(case.small, GPU.name) for case in cases}


def main(arguments: list[str]) -> int:
    """Runs the op's cases."""
    found = found_of(arguments[0], "--dry-run" in arguments)
    values = [value for value in found.values() if not isinstance(value, str)]
    words = f"{len(values)} equal the reference" if values else str(next(iter(found.values())))
    wrong = {name: value for name, value in found.items() if not isinstance(value, str) and not value <= 1}
    return answer(f"wrong: {wrong}" if wrong else words, is_right=not wrong, excess=found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
