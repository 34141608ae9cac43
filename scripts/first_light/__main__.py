"""Command line of scripts/first_light_gpu.sh: python -m scripts.first_light [--dry-run] [--budget MINUTES] ...

Flow:    options -> stages -> runner -> out/first_light/results.jsonl -> report -> table.md, roofline.png

Goes on where an earlier run stopped: rows that the journal holds are not run again. The exit status is 1 where a row
failed, 130 after an interrupt, and 0 else, also where the budget left rows out, which the next run takes.
"""

from __future__ import annotations

import argparse
import functools
import sys
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

from kvjax.cli.pictures.figures import save_figure
from kvjax.cli.running.output_files import has_matplotlib
from scripts.first_light import report
from scripts.first_light.journal import DONE, Journal
from scripts.first_light.runner import ROOT, Stage, run
from scripts.first_light.stages import stages
from scripts.tune_gpu import card_here

NAMES = ("facts", "tests", "headlines", "rivals", "tuning")


def picked(found: list[Stage], names: list[str] | None, pattern: str) -> list[Stage]:
    """The stages called so, with the rows whose names match.

    Raises:
        ValueError: no row is left.
    """
    kept = [
        replace(stage, rows=tuple(row for row in stage.rows if fnmatch(row.name, pattern)))
        for stage in found
        if names is None or stage.name in names
    ]
    if not any(stage.rows for stage in kept):
        raise ValueError(f"expected rows that match {pattern!r}, got none in {[stage.name for stage in kept]}")
    return kept


def write_report(journal: Journal, out: Path) -> None:
    """The table, and the roofline where there are times and matplotlib."""
    (out / "table.md").write_text(report.markdown(journal.records))
    peaks, rows = report.peaks_of(journal.records), list(report.roofline_rows(journal.records))
    if peaks is not None and rows and has_matplotlib():
        from scripts.lab.bench import roofline

        title = journal.records["facts"].result["words"] if "facts" in journal.records else "first light"
        save_figure(roofline.draw(rows, peaks, title), out / "roofline.png")


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="first_light_gpu.sh", description=__doc__.splitlines()[2])
    made.add_argument("--budget", type=float, default=38, metavar="MINUTES", help="of all stages (default %(default)s)")
    made.add_argument("--out", type=Path, default=ROOT / "out" / "first_light", metavar="FOLDER", help="of the results")
    made.add_argument("--stage", action="append", choices=NAMES, help="repeatable; default: all")
    made.add_argument("--row", default="*", metavar="PATTERN", help="names of rows, such as 'time: decode*'")
    made.add_argument("--retry", action="store_true", help="rows that failed too")
    made.add_argument("--dry-run", action="store_true", help="small sizes on the CPU, without a card")
    made.add_argument("--list", action="store_true", help="print the rows and stop")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Runs what is left to run."""
    made = parser()
    options = made.parse_args(arguments)
    if options.budget <= 0:
        made.error(f"expected --budget of more than 0 minutes, got {options.budget}")
    card = None if options.dry_run else card_here()
    if card is None and not options.dry_run:
        made.error("expected an NVIDIA GPU that jax sees, got none; --dry-run tries all stages without one")
    out = options.out.resolve()
    try:
        wanted = picked(stages(out, card), options.stage, options.row)
    except ValueError as error:
        made.error(str(error))
    if options.list:
        print("\n".join(f"{stage.name}: {row.name}" for stage in wanted for row in stage.rows))
        return 0
    out.mkdir(parents=True, exist_ok=True)
    try:
        journal = Journal(out / "results.jsonl")
    except ValueError as error:
        made.error(str(error))
    status = 0
    try:
        summary = run(
            wanted, journal, 60 * options.budget, retry=options.retry, say=functools.partial(print, flush=True)
        )
        print(f"{summary.done} done, {summary.failed} failed, {summary.skipped} left out for want of time")
    except KeyboardInterrupt:
        status = 130
    write_report(journal, out)
    print(f"results: {out / 'results.jsonl'}, {out / 'table.md'}")
    return status or int(any(record.state != DONE for record in journal.records.values()))


if __name__ == "__main__":
    sys.exit(main())
