"""Compiles the headline cases of the TPU attention kernels with the newest libtpu, against the committed figures.

    python scripts/tpu_headlines.py                        what CI runs: about a minute
    python scripts/tpu_headlines.py --libtpu previous      another compiler
    python scripts/tpu_headlines.py --update               commits what comes out, better or worse

Exit status: 0, or 1 where a figure is exceeded or a case does not compile. What the figures are:
scripts/lab/tpu/headlines.py; the committed ones, with bars and rivals: scripts/lab/tpu/headlines.json.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.lab.tpu.chips import prepare_environment
from scripts.lab.tpu.compiler import Compilation, CompilationError, compile_and_dump
from scripts.lab.tpu.headlines import FILE, Outcome, measure, read, write
from scripts.lab.tpu.libtpu import LibtpuError, release

ROW = "{:4} {:44} {:10} {:>9} {:>9} {:>7}  {:48} {}"
HEADER = ROW.format("chip", "", "unit", "figure", "committed", "bar", "rivals", "")


def main(arguments: list[str]) -> int:
    """Exit status: 0, or 1 where a figure is exceeded or a case does not compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--libtpu", default="newest", metavar="RELEASE", help="newest, previous, pinned, installed, ..."
    )
    parser.add_argument("--update", action="store_true", help="write the figures to the file")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="of one compilation")
    parser.add_argument("--file", type=Path, default=FILE, help="the committed figures")
    options = parser.parse_args(arguments)
    try:
        libtpu = release(options.libtpu)
    except LibtpuError as error:
        parser.error(str(error))
    committed, headlines = read(options.file)

    def compile_case(case: tuple[str, str, tuple[str, ...]]) -> Compilation | CompilationError | ValueError:
        chip, op, settings = case
        try:
            return compile_and_dump(
                chip, op, list(settings), kernels="(rpa|mla)_.*", timeout_s=options.timeout, libtpu=libtpu
            )
        except (CompilationError, ValueError) as error:  # ValueError: dumps that cannot be read
            return error

    print(f"libtpu {libtpu.version}; committed figures: {committed}\n{HEADER}", flush=True)
    cases = list(dict.fromkeys(headline.case for headline in headlines))
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        compiled = dict(zip(cases, pool.map(compile_case, cases), strict=True))
    for headline in headlines:
        found = compiled[headline.case]
        if not isinstance(found, Compilation):
            print(f"{headline.chip} {headline.name}: {found}", file=sys.stderr)
            continue
        outcomes.append(measure(headline, found))
        print(ROW.format(*outcomes[-1].row).rstrip())
    is_whole = len(outcomes) == len(headlines)
    if options.update and is_whole:
        write(options.file, libtpu.version, outcomes)
        return 0
    return int(not is_whole or any(outcome.fails for outcome in outcomes))


if __name__ == "__main__":
    prepare_environment()
    sys.exit(main(sys.argv[1:]))
