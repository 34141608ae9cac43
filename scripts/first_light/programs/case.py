"""One headline case: python -m scripts.first_light.programs.case {compare,time,rival} NAME [RIVAL] [--dry-run]

compare   the kernel, with the sizes it ships with, next to the reference at the case's full size
time      microseconds of the whole op and of its kernels alone, and how many kernels a call launches
rival     another implementation on the same numbers, by the clock of the whole op

The whole op: the wall clock of a batch of programs of several calls (lab/bench/timing.py), so launches and the gaps
between them count, for everyone alike; PyTorch's by events around as many calls. Kernels alone: CUPTI, their sum.
With --dry-run: the case at its small size by the reference, and one sample; of a rival its arguments alone.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs room beside JAX

import jax

from pallas_kernels.cases.case import Arguments, Case
from pallas_kernels.cases.compare import excess
from scripts.bench_gpu import GPU
from scripts.first_light.headlines import headline
from scripts.first_light.programs.answer import answer
from scripts.lab.bench.chain import Chain, num_rotated
from scripts.lab.bench.gpu_timing import cupti, launches
from scripts.lab.bench.rivals_gpu import rivals
from scripts.lab.bench.timing import Timing, wall_clock

_REPEATS = 10


def compare(case: Case, backend: str) -> int:
    """Both once; in a dry run the reference twice."""
    outputs = []
    for by in ("reference", backend):
        outputs.append(jax.jit(functools.partial(case.call, by))(*case.arguments(0)))
    found = excess(outputs[1], outputs[0])
    return answer(f"{found:.3g} tolerances off", is_right=found <= 1, excess=found)


def times(case: Case, backend: str, repeats: int) -> int:
    """The kernel's clocks; CUPTI's only where it sees kernels."""
    rotated = arguments_of(case)
    chain = Chain(functools.partial(case.call, backend), rotated, writes=case.writes)
    op = wall_clock(chain, repeats)
    kernels = None if case.writes else cupti(chain, repeats)
    count = None if case.writes else launches(chain)
    words = f"op {op.median_us:,.1f} us"
    if kernels is not None:
        words += f", kernels {kernels.median_us:,.1f} us, {count:.1f} launches"
    kernel_us = None if kernels is None else kernels.median_us
    return answer(words, launches=count, kernel_us=kernel_us, **timing_of(case, op))


def rival_times(case: Case, name: str, repeats: int, is_dry: bool) -> int:
    """Another's clock; one that cannot do the case is no fault."""
    rival = next((rival for rival in rivals(case) if rival.name == name), None)
    if rival is None:
        raise ValueError(f"expected a rival out of {[rival.name for rival in rivals(case)]}, got {name!r}")
    rotated = arguments_of(case)
    try:
        prepared = [rival.prepare(arguments) for arguments in rotated]
        if is_dry:
            return answer("arguments prepared")
        if rival.call is None:
            assert rival.time is not None
            found = rival.time(prepared, repeats)
        else:
            found = wall_clock(Chain(rival.call, prepared, writes=False), repeats)
    except NotImplementedError as error:
        return answer(f"cannot: {error}", cannot=str(error))
    return answer(f"op {found.median_us:,.1f} us {rival.note}", note=rival.note, **timing_of(case, found))


def arguments_of(case: Case) -> list[Arguments]:
    """As many sets as no cache holds."""
    return [case.arguments(seed) for seed in range(num_rotated(case.work.num_bytes, GPU.cache_bytes))]


def timing_of(case: Case, timing: Timing) -> dict[str, Any]:
    """For the table."""
    return {
        "op_us": timing.median_us,
        "spread_us": timing.spread_us,
        "clock": timing.clock,
        "num_bytes": case.work.num_bytes,
        "flops": case.work.flops,
    }


def main(arguments: list[str]) -> int:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("compare", "time", "rival"))
    parser.add_argument("name")
    parser.add_argument("rival", nargs="?")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    bench = headline(options.name).bench_case
    case = bench.small if options.dry_run else bench.case
    backend, repeats = ("reference", 1) if options.dry_run else (GPU.name, _REPEATS)
    programs: dict[str, Callable[[], int]] = {
        "compare": lambda: compare(case, backend),
        "time": lambda: times(case, backend, repeats),
        "rival": lambda: rival_times(case, options.rival, repeats, options.dry_run),
    }
    return programs[options.what]()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
