"""Command line, and the loop over cases, of both benchmark scripts.

Flow:    arguments -> cases -> [driver] on a device: warm-up, comparison, times, rivals; else a dry run -> rows

A dry run does everything but time: each case at a small size runs once, chained on rotated arguments as it would be for
a measurement, and is compared with the reference. The bytes and operations that it prints are those of the full size.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import jax

from kvjax.cli.running.output_files import output_file
from pallas_kernels.cases.case import Case, Step
from pallas_kernels.cases.find import case_types
from scripts.lab.bench import measure, report
from scripts.lab.bench.case import BenchCase, Sizes, bench_cases
from scripts.lab.bench.platform import Platform

DTYPES = ("bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")


@dataclass
class Found:
    """What a run gave."""

    about: dict[str, Any]  # versions, command, device, peaks
    rows: list[report.Row] = field(default_factory=list)


def all_cases(names: Iterable[str], sizes: Sizes) -> Iterator[BenchCase]:
    """The cases of these ops."""
    for name in names:
        yield from bench_cases(case_types()[name], sizes)


def parser(doc: str, platform: Platform) -> argparse.ArgumentParser:
    """The options that both scripts have."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--op", action="append", choices=sorted(case_types()), help="repeatable; default: all")
    made.add_argument(
        "--shape", action="append", metavar="NAME", help="of the op's shapes.py; repeatable; default: all"
    )
    made.add_argument("--kind", action="append", metavar="NAME", help="decode, prefill...; repeatable; default: all")
    made.add_argument("--page", action="append", type=int, metavar="N", help=f"default: {platform.pages}; repeatable")
    made.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the pages (default: %(default)s)")
    made.add_argument("--shards", type=int, default=1, help="tensor parallelism; one shard is measured")
    made.add_argument("--batch", type=int, default=0, help="sequences, pages or tokens (default: by the case)")
    made.add_argument("--context", type=int, default=0, help="tokens of a sequence (default: by the case)")
    made.add_argument("--repeats", type=int, default=10, help="samples of each median (default: %(default)s)")
    made.add_argument("--no-rivals", action="store_true", help="the kernels alone")
    made.add_argument("--time-reference", action="store_true", help="the reference too, at full size: slow")
    made.add_argument("--budget", type=float, metavar="MINUTES", help="after which no case is begun (default: none)")
    made.add_argument(
        "--results", type=output_file, metavar="FILE", help="rows as JSON lines, written case by case, and gone on from"
    )
    made.add_argument("--json", type=output_file, metavar="FILE", help="write the rows as JSON")
    made.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    made.add_argument("--dry-run", action="store_true", help="even where there is a device")
    made.add_argument("--by-reference", action="store_true", help="in a dry run: no kernel is interpreted, quicker")
    return made


def picked(options: argparse.Namespace, platform: Platform) -> list[BenchCase]:
    """The cases asked for, those that measure the same once, under the name of the first shape.

    Raises:
        ValueError: there is none, or a number is not positive.
    """
    if options.repeats < 1 or options.shards < 1 or min(options.batch, options.context, *(options.page or [1])) < 0:
        raise ValueError("expected --repeats and --shards of at least 1 and no negative size")
    if options.budget is not None and not options.budget > 0:
        raise ValueError(f"expected --budget of more than 0 minutes, got {options.budget}")
    found = []
    for page in options.page or platform.pages:
        step = Step(options.batch, options.context)
        sizes = Sizes(platform.name, page, options.dtype, options.shards, step)
        found += all_cases(options.op or sorted(case_types()), sizes)
    wanted = [
        case
        for case in found
        if (options.shape is None or case.model in options.shape)
        and (options.kind is None or case.kind in options.kind)
    ]
    if not wanted:
        names = sorted({case.model for case in found})
        raise ValueError(
            f"no case is of {options.shape or 'any shape'} and {options.kind or 'any kind'}; shapes: {names}"
        )
    first: dict[Case, BenchCase] = {}
    for case in wanted:
        first.setdefault(case.case, case)
    return list(first.values())


def run(platform: Platform, options: argparse.Namespace, cases: list[BenchCase]) -> Found:
    """Measures or tries every case, printing as it goes; writes the JSON."""
    device = None if options.dry_run else platform.device()
    found = Found(about={"jax": jax.__version__, "command": sys.argv, "device": device.device_kind if device else None})
    if device is None:
        print(f"no {platform.name} here: a dry run at small sizes, without times", flush=True)
        rows_of = functools.partial(measure.dry_run, platform=platform, by_reference=options.by_reference)
    else:
        peaks = platform.peaks(device)
        found.about["peaks"] = asdict(peaks)
        speeds = f"{peaks.bytes_per_s / 1e12:.2f} TB/s, {peaks.flops_per_s / 1e12:.0f} TFLOP/s"
        print(f"{device.device_kind}, jax {jax.__version__}; {speeds} ({peaks.source})", flush=True)
        rows_of = functools.partial(
            measure.on_device,
            platform=platform,
            peaks=peaks,
            repeats=options.repeats,
            rivals=not options.no_rivals,
            time_reference=options.time_reference,
        )
    print(report.HEADER, flush=True)
    found.rows += _rows(cases, rows_of, options)
    if options.json is not None:
        report.write_json(options.json, found.rows, found.about)
    return found


def _rows(
    cases: list[BenchCase], rows_of: Callable[[BenchCase], Iterator[report.Row]], options: argparse.Namespace
) -> Iterator[report.Row]:
    """Those in `--results`, and those of every other case that the budget lets begin."""
    known = {} if options.results is None else report.read_cases(options.results)
    end = math.inf if options.budget is None else time.monotonic() + 60 * options.budget
    left_out = 0
    for case in cases:
        if case.name in known:
            yield from known[case.name]
        elif time.monotonic() > end:
            left_out += 1
        else:
            rows = []
            for row in rows_of(case):
                rows.append(row)
                print(report.line(row), flush=True)
            if options.results is not None:
                report.append_case(options.results, case.name, rows)
            yield from rows
    if left_out:
        print(f"{left_out} cases left out for want of time", flush=True)
