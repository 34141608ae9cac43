"""Makes random single-operator changes of kvjax, one at a time, and says which of them no test notices.

    scripts/mutate_core.py --count 300 --seed 0 --results /tmp/mutants.jsonl          of kvjax/core, by tests/core
    scripts/mutate_core.py --of kvjax/tiers --tests tests/tiers --results /tmp/tiers.jsonl
    scripts/mutate_core.py --results /tmp/mutants.jsonl --only pool/       one room's part of the sample
    scripts/mutate_core.py --results /tmp/mutants.jsonl --again            what was not killed before, once more

Flow:    seed -> sites.sample -> [mutate_core] -> tests of the changed line, in a fork -> results, report

Needs `pip install -e .[test,mutation]` and Python 3.12. A change is made in memory: no file of the tree is written. The
first call runs all of the tests once, to record which test runs which line; the record lies next to the results. What
is sampled and what is left out: scripts/mutation/sites.py. What the survivors were: docs/mutants.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # `mutation`, from whichever directory this is started
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutation.results import Results, diff_of
from mutation.runs import Collected, Outcome, collect, in_forks, run_import
from mutation.sites import Change, sample
from mutation.test_lines import TestLines, source_hashes

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "kvjax"
CANNOT_PATCH = "cannot patch"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--of", nargs="+", default=["kvjax/core"], help="modules and folders (default: %(default)s)")
    parser.add_argument("--tests", nargs="+", default=["tests/core"], help="likewise (default: %(default)s)")
    parser.add_argument("--count", type=int, default=300, help="changes in the sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="parts of paths: of the sample, the changes of these modules")
    parser.add_argument("--results", type=Path, required=True, help="JSON lines; a later call goes on from them")
    parser.add_argument("--again", action="store_true", help="run what the results do not call killed once more")
    parser.add_argument("--budget", type=float, default=float("inf"), help="minutes after which no change is begun")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds of processor time for one change")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    began = time.monotonic()
    os.chdir(ROOT)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    results = Results(options.results, commit, options.seed)
    changes = sample(ROOT, options.of, options.seed, options.count)
    if options.only:
        changes = [change for change in changes if any(part in change.path for part in options.only)]
    todo = [change for change in changes if not results.is_settled(change, options.again)]
    print(f"seed {options.seed}, commit {commit}: {len(changes)} changes, {len(todo)} to run", flush=True)
    lines_path = options.results.with_suffix(".lines.json")

    def is_late() -> bool:
        return time.monotonic() - began > 60 * options.budget

    def run_share(changes: list[Change], run: Callable[[Change], Outcome]) -> Callable[[int], None]:
        def body(share: int) -> None:
            for change in changes[share :: options.jobs]:
                if is_late():
                    break
                source = (ROOT / change.path).read_text()
                results.add(change, run(change), diff_of(source, change.mutated(source)))

        return body

    def work(collected: Collected) -> None:
        _record(collected, options.tests, lines_path, options.jobs)
        patched = [change for change in todo if not collected.lines.runs_at_import(change)]
        in_forks(options.jobs, run_share(patched, collected.run))

    if todo:  # in a fork, so that this process has imported neither kvjax nor the tests
        plugin = Collected(ROOT, PACKAGE, TestLines.read(lines_path), options.limit, work)
        in_forks(1, lambda share: collect(options.tests, plugin))
        results.read()
        lines = TestLines.read(lines_path)
        left = [change for change in todo if lines.runs_at_import(change) or results.outcome(change) == CANNOT_PATCH]
        in_forks(options.jobs, run_share(left, lambda change: run_import(change, ROOT, PACKAGE, lines, options.limit)))
        results.read()
    results.report(changes, time.monotonic() - began)
    return 0


def _record(collected: Collected, tests: Sequence[str], path: Path, jobs: int) -> None:
    """Brings the record of lines up to date and writes it."""
    hashes = source_hashes(ROOT, PACKAGE, *tests)
    lines = collected.lines
    stale = lines.stale(collected.node_ids, hashes)
    print(f"recording the lines that {len(stale)} of {len(collected.node_ids)} tests run", flush=True)
    lines.tests = {name: lines.tests[name] for name in collected.node_ids if name in lines.tests}
    lines.tests |= collected.record(stale, jobs)
    lines.hashes = hashes
    lines.write(path)


if __name__ == "__main__":
    sys.exit(main())
