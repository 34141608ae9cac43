"""Times the host core against plain baselines, case by case, in one process.

Flow:    scripts/bench_host_cases/*.cases() -> [bench_host] -> table on the terminal, `--json FILE`

The samples of a case and of its baseline are taken in turns (`--runs` rounds), so that a busy machine slows both; each
figure is CPU time, the least of the rounds' medians. The JSON file is a list of {"name", "median_us", "baseline_us",
"vllm_us", "runs"}. With `--vllm VERSION` vLLM's own code takes its turn too, in the environment that
`vllm_conformance.sh VERSION --setup-only` makes; only the cases that it has a counterpart of run then.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the cases, from whichever directory this is started

from bench_host_cases.case import BenchCase

from kvjax.cli.running.output_files import output_file

VLLM_MODULES = ("decoding", "pool", "prompts")  # of cases that vLLM has a counterpart of; they need no jax
MODULES = (*VLLM_MODULES, "engine", "step_inputs")


@dataclass(frozen=True)
class Result:
    """One case, in microseconds: the least of the medians of `runs` rounds."""

    name: str
    median_us: float
    baseline_us: float
    runs: int
    vllm_us: float | None = None


def all_cases(names: Sequence[str] = MODULES) -> list[BenchCase]:
    """The cases of these modules."""
    modules = [importlib.import_module(f"bench_host_cases.{name}") for name in names]
    return [case for module in modules for case in module.cases()]


def matches(name: str, pattern: str) -> bool:
    """Whether a case is asked for: by shell pattern, or by a part of its name."""
    return pattern in name or fnmatchcase(name, pattern)


def measure(case: BenchCase, runs: int, *, vllm: bool = False) -> Result:
    """Runs a case, its baseline and, where asked for, vLLM's code in turns."""
    calls = [case.run, case.baseline, *([case.vllm] if vllm and case.vllm is not None else [])]
    rounds = [[median(call()) for call in calls] for _ in range(runs)]
    ours, baseline, *others = (round(min(medians), 3) for medians in zip(*rounds, strict=True))
    return Result(case.name, ours, baseline, runs, *others)


def row(result: Result) -> str:
    """One line of the table."""
    ratio = result.baseline_us / result.median_us
    line = f"{result.name:40} {result.median_us:12,.1f} {result.baseline_us:14,.1f} {ratio:8.1f}x"
    if result.vllm_us is None:
        return line
    return f"{line} {result.vllm_us:12,.1f} {result.vllm_us / result.median_us:8.1f}x"


def known_fields(result: Result) -> dict[str, object]:
    """A result for the JSON file, without what was not measured."""
    return {name: value for name, value in asdict(result).items() if value is not None}


def run_beside_vllm(version: str, arguments: list[str]) -> NoReturn:
    """Goes on in the environment of that release of vLLM.

    Raises:
        SystemExit: there is none.
    """
    folder = Path(os.environ.get("KVJAX_VLLM_DIR", Path(__file__).resolve().parents[1] / ".cache" / "vllm"))
    python = folder / version / "python"
    if not python.exists():
        raise SystemExit(f"expected {python}; make it: scripts/vllm_conformance.sh {version} --setup-only")
    os.execv(python, [str(python), str(Path(__file__).resolve()), *arguments])


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints, writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--only", metavar="PATTERN", help="cases whose name holds or matches this (shell pattern)")
    parser.add_argument("--runs", type=int, default=3, help="rounds of each case (default %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument("--vllm", metavar="VERSION", help="time this release of vLLM too")
    options = parser.parse_args(arguments)
    if options.runs < 1:
        parser.error(f"expected --runs of at least 1, got {options.runs}")
    vllm = options.vllm is not None
    if vllm and find_spec("vllm") is None:
        run_beside_vllm(options.vllm, sys.argv[1:] if arguments is None else arguments)
    candidates = [case for case in all_cases(VLLM_MODULES) if case.vllm is not None] if vllm else all_cases()
    cases = [case for case in candidates if options.only is None or matches(case.name, options.only)]
    if not cases:
        parser.error(f"no case matches {options.only!r}; --list names them")
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0

    own = f" {'vLLM us':>12} {'ratio':>9}" if vllm else ""
    print(f"{'case':40} {'median us':>12} {'baseline us':>14} {'ratio':>9}{own}", flush=True)
    results = []
    for case in cases:
        results.append(measure(case, options.runs, vllm=vllm))
        print(row(results[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([known_fields(result) for result in results], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
