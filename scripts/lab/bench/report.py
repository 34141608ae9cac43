"""Rows of the table, as text and as JSON.

Flow:    driver -> Row -> [report] -> table on the terminal, `--json FILE`
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.lab.bench.case import BenchCase
from scripts.lab.bench.timing import Timing

KERNEL, CANNOT, FAILED = "kernel", "cannot", "failed"


@dataclass(frozen=True)
class Peaks:
    """What a device can do."""

    bytes_per_s: float
    flops_per_s: float
    source: str  # "specification of v6e", "measured"


@dataclass(frozen=True)
class Row:
    """One case, run by one implementation. Without a device there are no times and no shares."""

    name: str
    op: str
    by: str  # "kernel", "reference", or who else
    num_bytes: int
    flops: int
    median_us: float | None = None
    spread_us: float | None = None  # between the quartiles
    bandwidth_share: float | None = None
    flops_share: float | None = None
    clock: str | None = None
    excess: float | None = None  # difference from the reference over its tolerance
    note: str = ""


def row(
    case: BenchCase,
    by: str,
    timing: Timing | None = None,
    peaks: Peaks | None = None,
    excess: float | None = None,
    note: str = "",
) -> Row:
    """Of one run; shares where there are a time and a device."""
    work = case.case.work
    found = Row(case.name, case.case.op, by, work.num_bytes, work.flops, excess=excess, note=note)
    if timing is None:
        return found
    seconds = timing.median_us / 1e6
    known = peaks is not None and seconds > 0
    return Row(
        **{
            **asdict(found),
            "median_us": timing.median_us,
            "spread_us": timing.spread_us,
            "bandwidth_share": work.num_bytes / seconds / peaks.bytes_per_s if known else None,
            "flops_share": work.flops / seconds / peaks.flops_per_s if known else None,
            "clock": timing.clock,
        }
    )


HEADER = (
    f"{'case':82} {'by':24} {'MB':>9} {'GFLOP':>9} {'median us':>10} {'+-':>7} {'bytes/s':>8} {'flop/s':>8}  result"
)


def line(row: Row) -> str:
    """One line of the table: bytes per second and operations per second in shares of the device's."""
    times = f"{_number(row.median_us)} {_number(row.spread_us, 7)} {_share(row.bandwidth_share)}"
    sizes = f"{row.num_bytes / 1e6:9,.2f} {row.flops / 1e9:9,.2f}"
    return f"{row.name:82} {row.by:24} {sizes} {times} {_share(row.flops_share)}  {verdict(row)}"


def verdict(row: Row) -> str:
    """Whether the result was right, or why there is none."""
    if row.excess is None:
        return row.note
    word = "equal" if row.excess == 0 else "close" if row.excess <= 1 else f"wrong: {row.excess:.3g} tolerances off"
    return f"{word}, {row.note}" if row.note else word


def is_wrong(row: Row) -> bool:
    """Whether a result of ours is not the reference's, or our own code failed."""
    is_ours = row.by.startswith((KERNEL, "reference"))
    return is_ours and ((row.excess is not None and not row.excess <= 1) or row.note.startswith(FAILED))


def write_json(path: Path, rows: Iterable[Row], about: dict[str, Any]) -> None:
    """{"about": device, versions, command, peaks; "rows": [...]}."""
    path.write_text(json.dumps({"about": about, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")


def append_case(path: Path, name: str, rows: Iterable[Row]) -> None:
    """A JSON line with the rows of one case."""
    whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("a") as file:
        file.write(("" if whole else "\n") + json.dumps({"case": name, "rows": [asdict(row) for row in rows]}) + "\n")


def read_cases(path: Path) -> dict[str, list[Row]]:
    """The rows of each case that `append_case` wrote; a line that a kill tore off is left out.

    Raises:
        ValueError: a line is whole JSON and no case.
    """
    found: dict[str, list[Row]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            read = json.loads(line)
        except json.JSONDecodeError:
            continue
        try:
            found[read["case"]] = [Row(**row) for row in read["rows"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: expected cases of a benchmark, got {line[:80]!r}") from error
    return found


def _number(value: float | None, width: int = 10) -> str:
    return f"{'-' if value is None else f'{value:,.1f}':>{width}}"


def _share(value: float | None) -> str:
    return f"{'-' if value is None else f'{100 * value:.1f} %':>8}"
