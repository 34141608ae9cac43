"""Times the host core against plain baselines, case by case, in one process.

Flow:    scripts/bench_host_cases/*.cases() -> [bench_host] -> table on the terminal, `--json FILE`

The samples of a case and of its baseline are taken in turns (`--runs` rounds), so that a busy machine slows both. The
median is over the samples of all rounds. The JSON file is a list of {"name", "median_us", "baseline_us", "runs"}.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the cases, from whichever directory this is started

import bench_host_cases
from bench_host_cases.case import BenchCase

from kvjax.cli.output_files import output_file


@dataclass(frozen=True)
class Result:
    """Medians of one case, in microseconds, over `runs` rounds."""

    name: str
    median_us: float
    baseline_us: float
    runs: int


def all_cases() -> list[BenchCase]:
    """The cases of every module of the package."""
    names = sorted(module.name for module in pkgutil.iter_modules(bench_host_cases.__path__) if module.name != "case")
    modules = [importlib.import_module(f"bench_host_cases.{name}") for name in names]
    return [case for module in modules if hasattr(module, "cases") for case in module.cases()]


def matches(name: str, pattern: str) -> bool:
    """Whether a case is asked for: by shell pattern, or by a part of its name."""
    return pattern in name or fnmatchcase(name, pattern)


def measure(case: BenchCase, runs: int) -> Result:
    """Runs a case and its baseline in turns."""
    ours: list[float] = []
    baseline: list[float] = []
    for _ in range(runs):
        ours += case.run()
        baseline += case.baseline()
    return Result(case.name, round(median(ours), 3), round(median(baseline), 3), runs)


def row(result: Result) -> str:
    """One line of the table."""
    ratio = result.baseline_us / result.median_us
    return f"{result.name:40} {result.median_us:12,.1f} {result.baseline_us:14,.1f} {ratio:8.1f}x"


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints, writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--only", metavar="PATTERN", help="cases whose name holds or matches this (shell pattern)")
    parser.add_argument("--runs", type=int, default=3, help="rounds of each case (default %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    options = parser.parse_args(arguments)
    if options.runs < 1:
        parser.error(f"expected --runs of at least 1, got {options.runs}")
    cases = [case for case in all_cases() if options.only is None or matches(case.name, options.only)]
    if not cases:
        parser.error(f"no case matches {options.only!r}; --list names them")
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0

    print(f"{'case':40} {'median us':>12} {'baseline us':>14} {'ratio':>9}", flush=True)
    results = []
    for case in cases:
        results.append(measure(case, options.runs))
        print(row(results[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
