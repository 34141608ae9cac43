"""Writes tests/quick_cases.json: of which parametrized tests the test command runs a few cases, the others are sweeps.

Usage:   scripts/test.sh --junitxml run.xml, then python scripts/quick_cases.py run.xml [--seconds 2] [--share 6]
Flow:    seconds of every case of a whole run -> tests whose cases take long together -> how many cases are kept

A test keeps one case in `--share`, at least one, so every law is tested in every run; cases are spread evenly over
their order. `pytest -m sweep` runs the others. Tests that are named in `WHOLE` keep all.
"""

from __future__ import annotations

import argparse
import json
import math
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

OUT = Path(__file__).parent.parent / "tests" / "quick_cases.json"
# By the beginning of a node id: cases that are cheap one by one and are the law ("every pool size"), and the logits of
# every family.
WHOLE = (
    "tests/core/",
    "tests/replay/",
    "tests/models/test_families.py::test_prefill_and_decoding_are_hugging_faces",
)


def seconds_of_cases(path: Path) -> dict[str, list[float]]:
    """Seconds of each case, by the test's node id, of a run that pytest wrote as JUnit XML."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        module = case.get("classname", "").replace(".", "/") + ".py"
        seconds[f"{module}::{case.get('name', '').split('[')[0]}"].append(float(case.get("time", 0)))
    return seconds


def kept_cases(seconds: dict[str, list[float]], least_seconds: float, share: int) -> dict[str, int]:
    """Cases that a test keeps, for those that take `least_seconds` together."""
    return {
        test: max(1, math.ceil(len(cases) / share))
        for test, cases in sorted(seconds.items())
        if len(cases) > 1 and sum(cases) >= least_seconds and not test.startswith(WHOLE)
    }


def main() -> None:
    """Writes the file, and says what it saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("junit", type=Path, help="JUnit XML of a run of all cases")
    parser.add_argument("--seconds", type=float, default=2.0, help="tests of so many in all (default: 2)")
    parser.add_argument("--share", type=int, default=6, help="one case in so many is kept (default: 6)")
    args = parser.parse_args()
    seconds = seconds_of_cases(args.junit)
    kept = kept_cases(seconds, args.seconds, args.share)
    OUT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    before = sum(map(sum, seconds.values()))
    saved = sum(sum(seconds[test]) * (1 - count / len(seconds[test])) for test, count in kept.items())
    print(f"{before:,.0f} s of all cases; {before - saved:,.0f} s with {len(kept)} tests cut to a few")


if __name__ == "__main__":
    main()
