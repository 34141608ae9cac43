"""What GPUs run whose kernels cannot take a call, in Triton or XLA, compiled without a card: launches, memory, bytes.

    python scripts/gpu_fallback.py [--case "decode 64 x 4k"] [--subset] [--check] [--json FILE]

Cases, cards and bars: scripts/gpu_aot/fallback_cases.py. Of a call: *launches* of kernels, loops counted as often as
the step's lengths make them run; *temporaries* that XLA allocates; *moved*, the bytes that all kernels read and write,
of one in Triton what its programs do;
*named*, those of the pages that the tables name (of states: read and written, and of inputs and outputs). Time on
paper: bytes over the card's bandwidth, or products over its peak where they take longer; *least* that of what is named,
moved once. `--check` fails where a case is above its bars. Where it runs: see scripts/gpu_compile.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.gpu_aot.fallback_cases import CASES, MIB, SUBSET, Case

ROOT = Path(__file__).resolve().parents[1]
ROW = "{:34} {:5} {:>9} {:>12} {:>9} {:>9} {:>9} {:>9} {:>6}"


def chosen(subset: bool) -> list[Case]:
    """All cases, or those that CI compiles."""
    return [case for case in CASES if not subset or case.name in SUBSET]


def compile_case(case: Case) -> dict[str, Any]:
    """The record of a case.

    Raises:
        RuntimeError: the compiler refused, or CUDA's wheels are missing.
    """
    python = os.environ.get("KVJAX_CUDA_PYTHON", sys.executable)
    with tempfile.TemporaryDirectory() as dump:
        command = [python, "-m", "scripts.gpu_aot.fallback", case.name, dump]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{case.name}: {' '.join(done.stderr.strip().splitlines()[-1:])}")
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


def problems(case: Case, record: dict[str, Any]) -> list[str]:
    """Where a case is above its bars, in words."""
    bars = {
        "launches": case.most_launches,
        "temporary_bytes": case.most_temporary_bytes,
        "times": case.most_times,
    }
    return [
        f"{case.name}: expected at most {most} {name}, got {record[name]:.4g}"
        for name, most in bars.items()
        if record[name] > most
    ]


def row(record: dict[str, Any]) -> str:
    """A line of the table."""
    return ROW.format(
        record["case"],
        record["card"],
        record["launches"],
        f"{record['temporary_bytes'] / MIB:.0f} MiB",
        f"{record['bytes'] / 1e9:.2f} GB",
        f"{record['named_bytes'] / 1e9:.2f} GB",
        f"{record['paper_ms']:.2f} ms",
        f"{record['least_ms']:.2f} ms",
        f"{record['times']:.1f}",
    )


def report(cases: Sequence[Case]) -> tuple[list[dict[str, Any]], list[str]]:
    """Compiles and prints; (records, what is above bars)."""
    print(ROW.format("case", "card", "launches", "temporaries", "moved", "named", "on paper", "least", "times"))
    records, wrong = [], []
    for case in cases:
        record = compile_case(case)
        records.append(record)
        wrong += problems(case, record)
        print(row(record), flush=True)
    return records, wrong


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 1 with `--check` where a case is above its bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="repeatable")
    parser.add_argument("--subset", action="store_true", help="what CI compiles")
    parser.add_argument("--check", action="store_true", help="fail above the bars")
    parser.add_argument("--json", type=Path, metavar="FILE", help="records, too")
    options = parser.parse_args(arguments)
    cases = [case for case in CASES if case.name in options.case] if options.case else chosen(options.subset)
    records, wrong = report(cases)
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")
    if options.check:
        print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return int(options.check and bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
