"""`kvjax check`: every op on this machine's devices, one small case of each backend against its oracle.

Flow:    ops that have cases -> [run] -> a row each on stdout, --json FILE -> 1 where one fails
"""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax

from kvjax.cli.help_text import Example
from kvjax.cli.options.types import non_negative_int, positive_float
from kvjax.cli.running.output_files import STANDARD, output_file, write_json
from kvjax.cli.running.start_up import check_platform
from pallas_kernels.cases.case import Case
from pallas_kernels.cases.find import case_types
from pallas_kernels.cases.verdict import FAILED, OK, Verdict, check_op
from pallas_kernels.ran_on import chip, record

EXAMPLES = (
    Example("Check this machine's devices.", "kvjax check"),
    Example("Draw other cases, and keep every row.", "kvjax check --seed 7 --json check.json"),
)
ROW = "{:24} {:10} {:28} {:>10} {:>10} {:>8}  {}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kvjax check`."""
    parser.add_argument("--seed", type=non_negative_int, default=0, metavar="N", help="Draw the cases from this seed.")
    parser.add_argument(
        "--hang", type=positive_float, default=300.0, metavar="SECONDS", help="Let a case that takes longer fail."
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help=f"Write every row as JSON. {STANDARD}")
    parser.add_argument(
        "--record", action="store_true", help="Note in the package that these kernels ran right on this kind of chip."
    )


def run(args: argparse.Namespace) -> int:
    """Prints a row for each op and backend; 1 where one failed.

    Raises:
        ConfigError, RuntimeError: jax has no device.
        OSError: `--record` cannot write.
    """
    # The interpreter of GPU kernels blocks one of XLA's threads for each warpgroup; XLA reads their number here.
    os.environ.setdefault("NPROC", str(max(8, os.cpu_count() or 1)))
    check_platform()
    about = {"jax": jax.__version__, "platform": jax.default_backend(), "chip": chip(), "seed": args.seed}
    how = "kernels are interpreted" if about["platform"] == "cpu" else "its kernels are compiled"
    print(f"jax {about['jax']} on {about['chip']}: {how}; seed {args.seed}")
    print(ROW.format("op", "backend", "case", "difference", "tolerance", "seconds", ""))
    report = Report(about, args.json)
    for case_type in case_types().values():
        for backend in case_type.backends:
            with _ended_after(args.hang, report, case_type.op, backend):
                report.add(check_op(case_type, backend, args.seed))
    report.write()
    if args.record:
        record(report.ran_right(case_types()))
    return report.status


@dataclass
class Report:
    """The rows so far."""

    about: dict[str, Any]
    path: Path | None
    rows: list[Verdict] = field(default_factory=list)

    def add(self, row: Verdict) -> None:
        """Prints it."""
        self.rows.append(row)
        numbers = ("" if x is None else f"{x:.1e}" for x in (row.difference, row.tolerance))
        why = f": {' '.join(row.reason.split())}" if row.reason else ""
        outcome = f"{row.outcome}{why}"
        print(ROW.format(row.op, row.backend, row.size[:28], *numbers, f"{row.seconds:.1f}", outcome), flush=True)

    def write(self) -> None:
        """Writes the JSON that was asked for."""
        if self.path is not None:
            rows = [asdict(row) for row in self.rows]
            write_json(self.path, self.about | {"rows": rows}, indent=1)

    def ran_right(self, types: Mapping[str, type[Case]]) -> dict[str, list[str]]:
        """Names of the functions by backend, of ops whose case was right."""
        right: dict[str, list[str]] = {}
        for row in self.rows:
            if row.outcome == OK:
                right.setdefault(row.backend, []).extend(types[row.op].calls or [row.op])
        return right

    @property
    def status(self) -> int:
        """The command's exit status."""
        return int(any(row.outcome == FAILED for row in self.rows))


@contextmanager
def _ended_after(seconds: float, report: Report, op: str, backend: str) -> Iterator[None]:
    """A case that hangs cannot be stopped: it is reported as failed, and the process ends."""

    def hung() -> None:
        report.add(Verdict(op, backend, {}, outcome=FAILED, reason=f"no end after {seconds:g} s", seconds=seconds))
        report.write()
        os._exit(1)

    timer = threading.Timer(seconds, hung)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
