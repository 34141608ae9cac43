"""Compiles every op for every TPU chip at every model shape, split over 1 to 8 chips, on a machine without a TPU.

    python scripts/tpu_compile_all.py                            all, with bundles; a process and about 15 s a case
    python scripts/tpu_compile_all.py --no-dump --op kv_write    does it compile, and its memory: about 5 s a case
    python scripts/tpu_compile_all.py --subset                   what CI runs, a few minutes
    python scripts/tpu_compile_all.py --results all.json         goes on where an earlier run was stopped
    python scripts/tpu_compile_all.py --libtpu newest --libtpu previous      two compilers, bundles compared

Needs libtpu (kvjax[tpu-aot]), or pip for other releases of it. With several, exit status 1 also where a kernel of the
first has over 10 % more bundles than with another. Ops and shapes: scripts/lab/tpu/shape_cases.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.lab.compiled import compiled_types
from scripts.lab.tpu.chips import CHIPS
from scripts.lab.tpu.everything import HEADER, Result, compile_all, load, losses, save
from scripts.lab.tpu.libtpu import LibtpuError, Release, release
from scripts.lab.tpu.shape_cases import ShapeCase, shape_cases, subset


def main(arguments: list[str]) -> int:
    """Exit status: 0, or 1 where a case does not compile, or has more bundles than with another libtpu."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="name=value", help="of every case, such as page=16")
    parser.add_argument("--chip", action="append", choices=sorted(CHIPS), help="repeatable; default: all")
    parser.add_argument("--op", action="append", choices=sorted(compiled_types("tpu")), help="repeatable; default: all")
    parser.add_argument("--subset", action="store_true", help="a few cases of every op, without dumps of one libtpu")
    parser.add_argument("--no-dump", action="store_true", help="no bundles")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="of one compilation")
    parser.add_argument("--results", type=Path, metavar="FILE", help="written as cases end; those in it are kept")
    parser.add_argument(
        "--libtpu",
        action="append",
        metavar="RELEASE",
        help="repeatable: installed (default), newest, previous, pinned (by jax) or a version; bundles of the first "
        "are compared with the others'",
    )
    parser.add_argument("--loss", type=float, default=0.1, metavar="SHARE", help="of bundles that the first may lose")
    options = parser.parse_args(arguments)
    try:
        releases = list(dict.fromkeys(release(word) for word in options.libtpu or ["installed"]))
    except LibtpuError as error:
        parser.error(str(error))
    chips = tuple(options.chip or CHIPS)
    cases = shape_cases(options.op, tuple(options.settings))
    work = subset(cases, chips) if options.subset else [(chip, case) for case in cases for chip in chips]
    results = {result.key: result for result in (load(options.results) if options.results else []) if not result.error}
    asked = [(libtpu, *item) for libtpu in releases for item in work]
    todo = [item for item in asked if _key(*item) not in results]
    print(f"{len(asked)} cases, {len(asked) - len(todo)} of them known")
    print(HEADER, flush=True)

    def on_result(result: Result) -> None:
        results[result.key] = result
        print("\n".join(result.rows), flush=True)
        if result.error is not None:
            print(result.error, file=sys.stderr, flush=True)
        if options.results:
            save(options.results, results.values())

    start = time.monotonic()
    dumps = not options.no_dump and (len(releases) > 1 or not options.subset)
    for libtpu in releases:
        own = [(chip, case) for owner, chip, case in todo if owner == libtpu]
        compile_all(own, libtpu=libtpu, jobs=options.jobs, dumps=dumps, timeout_s=options.timeout, on_result=on_result)
    first, *others = ([results[_key(libtpu, *item)] for item in work] for libtpu in releases)
    failed = [result for some in (first, *others) for result in some if result.error is not None]
    print(f"{len(asked)} cases, {len(failed)} failed, {time.monotonic() - start:.0f} s")
    for result in failed:
        print(f"failed: {' '.join(result.key)}")
    lost = [line for other in others for line in losses(first, other, options.loss)]
    print("\n".join(f"lost: {line}" for line in lost), end="\n" if lost else "")
    return int(bool(failed or lost))


def _key(libtpu: Release, chip: str, case: ShapeCase) -> tuple[str, ...]:
    """The key of a result."""
    return (libtpu.version, chip, case.op, *case.settings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
