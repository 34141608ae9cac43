"""Random sweeps of the kernels against their references; prints op, backend, seed, cases and time.

    python scripts/sweep_kernels.py                                        every op, seed 0
    python scripts/sweep_kernels.py --op kv_write --backend tpu --seeds 0 20
    python scripts/sweep_kernels.py --minutes 10                           no new seed of an op after so long

Flow:    tests/pallas_kernels/<op>/sweep.py -> [sweep_kernels] -> a line per op, backend and seed

Kernels run compiled where there is a TPU or GPU, else interpreted with races watched; a seed of attention takes minutes
then. A wrong case is told with its seed and choice of features, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("NPROC", str(max(8, os.cpu_count() or 1)))  # threads of XLA, as in tests/conftest.py

from tests.pallas_kernels.sweeps import Sweep, find_sweeps

ROW = "{:24} {:8} {:>5} {:>6} {:>8}  {}"


def run_seed(sweep: Sweep, seed: int) -> tuple[int, BaseException | None]:
    """(cases that were right, error of the first that was not)."""
    cases = 0
    try:
        for _ in sweep(seed):
            cases += 1
    except Exception as error:
        return cases, error
    return cases, None


def main(arguments: list[str]) -> int:
    """Exit status: 0, or 1 where a case is wrong."""
    sweeps = find_sweeps()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", choices=sorted({op for op, _ in sweeps}), help="default: all")
    parser.add_argument("--backend", action="append", choices=sorted({b for _, b in sweeps}), help="default: all")
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 1), metavar=("FIRST", "END"))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no new seed after so long")
    options = parser.parse_args(arguments)
    chosen = {
        (op, backend): sweep
        for (op, backend), sweep in sweeps.items()
        if op in (options.op or [op]) and backend in (options.backend or [backend])
    }
    print(ROW.format("op", "backend", "seed", "cases", "seconds", ""), flush=True)
    failed = False
    begin = time.monotonic()
    for seed in range(*options.seeds):
        for (op, backend), sweep in chosen.items():
            if time.monotonic() - begin > 60 * options.minutes:
                return int(failed)
            start = time.monotonic()
            cases, error = run_seed(sweep, seed)
            seconds = f"{time.monotonic() - start:.1f}"
            print(ROW.format(op, backend, seed, cases, seconds, "right" if error is None else "WRONG"), flush=True)
            if error is not None:
                failed = True
                traceback.print_exception(error)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
