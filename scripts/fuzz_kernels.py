"""Every op of pallas_kernels against oracles in numpy float64 that share no code with it: random and hard cases.

    python scripts/fuzz_kernels.py --minutes 10                          all ops on all platforms, a new seed each time
    python scripts/fuzz_kernels.py --op selective_scan --platform tpu --seed 7
    python scripts/fuzz_kernels.py --op kv_write --platform tpu --seed 7 --first 12 --trials 1    one trial again

Flow:    op, platform, seed, number -> a random case -> steps of it -> [fuzz_kernels] -> a line a pair

Platforms: `reference` (plain jnp), `xla` (the same, vectorised for GPUs without kernels), `tpu`, `gpu` and `triton`
(Pallas kernels: compiled where there is a chip, else interpreted on CPU, of `tpu` and `gpu` some with races watched). A
wrong case is told with the command that repeats its trial; the exit status is then 1. So it is where a trial hangs for
longer than --hang seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("NPROC", str(max(8, os.cpu_count() or 1)))  # threads of XLA, as in tests/conftest.py

import jax
import numpy as np

from pallas_kernels.cases.case import Results
from pallas_kernels.cases.find import case_types
from pallas_kernels.interpret import compile_for

_ALL = ("reference", "xla", "tpu", "gpu", "triton")
_STEPS = 4  # of a case
_RACES_WATCHED = 0.2  # of the trials: it doubles the time of an interpreted kernel
_TRIALS_KEPT = 20  # compiled programs pile up; after so many trials jax forgets them
ROW = "{:24} {:10} {:>7} {:>7} {:>9}  {}"


@dataclass
class Result:
    """What the trials of one op on one platform came to."""

    op: str
    platform: str
    trials: int = 0
    cases: int = 0
    seconds: float = 0.0
    failures: list[dict[str, str]] = field(default_factory=list)  # command, error


def command(result: Result, seed: int, number: int) -> str:
    """What repeats a trial."""
    names = f"--op {result.op} --platform {result.platform}"
    return f"python scripts/fuzz_kernels.py {names} --seed {seed} --first {number} --trials 1"


def run_trial(result: Result, seed: int, number: int, hang_s: float) -> None:
    """Adds a trial to `result`; where it hangs, tells so and ends the process."""

    def hung() -> None:
        print(f"HANGS: {command(result, seed, number)}", flush=True)
        os._exit(1)

    timer = threading.Timer(hang_s, hung)
    timer.daemon = True
    timer.start()
    start = time.monotonic()
    try:
        for _ in cases_of(result.op, result.platform, seed, number):
            result.cases += 1
    except Exception as error:
        again = command(result, seed, number)
        text = "".join(traceback.format_exception(error))
        result.failures.append({"command": again, "error": text[-4000:]})
        print(f"WRONG: {again}\n{text[-4000:]}", flush=True)
    finally:
        timer.cancel()
    result.trials += 1
    result.seconds += time.monotonic() - start


def cases_of(op: str, platform: str, seed: int, number: int) -> Iterator[str]:
    """Draws a case, compiles its op once and checks several steps; a description of each that was right."""
    rng = np.random.default_rng([seed, zlib.crc32(f"{op} {platform}".encode()), number])
    case = case_types()[op].random(rng, platform)
    call, first = partial(case.call, platform), case.hard_arguments(rng)
    run = compile_for(platform, call, *first, watch_races=bool(rng.random() < _RACES_WATCHED))
    for step in range(_STEPS):
        arguments = case.hard_arguments(rng)
        try:
            case.assert_right(Results(*run(*arguments)), arguments)
        except BaseException as error:
            error.add_note(f"step {step} of {case}")
            raise
        yield f"step {step} of {case}"


def main(arguments: list[str]) -> int:
    """Exit status: 0, or 1 where a case is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", choices=sorted(case_types()), help="repeatable; default: all")
    parser.add_argument("--platform", action="append", choices=_ALL, help="repeatable; default: all")
    parser.add_argument(
        "--minutes", type=float, default=None, help="no new trial after so long; default: 1, or --trials"
    )
    parser.add_argument("--trials", type=int, default=None, help="of each op on each platform")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--seed", type=int, default=None, help="default: another every time")
    parser.add_argument("--hang", type=float, default=900, metavar="SECONDS", help="longest that a trial may take")
    parser.add_argument("--json", type=Path, metavar="FILE", help="results, too")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else int(np.random.SeedSequence().generate_state(1)[0])
    seconds = float("inf") if options.minutes is None and options.trials else 60 * (options.minutes or 1)
    print(f"seed {seed}", flush=True)
    results = [
        Result(op, platform)
        for op, case_type in case_types().items()
        for platform in case_type.backends
        if op in (options.op or [op]) and platform in (options.platform or [platform])
    ]
    begin, done = time.monotonic(), 0
    numbers = itertools.count(options.first)
    for number in itertools.islice(numbers, options.trials):
        for result in results:
            if time.monotonic() - begin > seconds:
                break
            run_trial(result, seed, number, options.hang)
            done += 1
            if done % _TRIALS_KEPT == 0:
                jax.clear_caches()
        if time.monotonic() - begin > seconds:
            break
    print(ROW.format("op", "platform", "trials", "cases", "seconds", ""))
    for result in results:
        verdict = f"{len(result.failures)} WRONG" if result.failures else "right" if result.cases else "not tried"
        print(ROW.format(result.op, result.platform, result.trials, result.cases, f"{result.seconds:.1f}", verdict))
    if options.json:
        options.json.write_text(json.dumps({"seed": seed, "results": [asdict(r) for r in results]}, indent=2) + "\n")
    return int(any(result.failures for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
