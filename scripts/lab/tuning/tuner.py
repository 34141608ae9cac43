"""What both tuners run: every candidate of every entry measured, results kept over an interruption.

Flow:    command line -> [parser, entries_of] -> entries -> candidates -> measure, kept in [Log] -> choices
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from pallas_kernels.tuned import Sizes
from scripts.lab.tuning.choice import HEADER, Choice, Record, choose, words
from scripts.lab.tuning.entries import Entry, entries


class Log:
    """Records by name, in a file that is rewritten after each; what is there is not measured again."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, Record] = json.loads(path.read_text()) if path is not None and path.exists() else {}

    def of(self, name: str, measure: Callable[[], Record]) -> Record:
        """The record called `name`: as it stands in the file, or measured now. One that failed is measured again."""
        if "error" in self._known.get(name, {"error": ""}):
            self._known[name] = measure()
            if self._path is not None:
                part = self._path.with_suffix(".part")
                part.write_text(json.dumps(self._known, indent=1) + "\n")
                part.replace(self._path)
        return self._known[name]


def measured(
    entry: Entry, wanted: Iterable[Sizes], measure: Callable[[Entry, Sizes], Record], options: argparse.Namespace
) -> list[Record]:
    """A record for each candidate, out of `options.results` where it is there; the first alone if that one fails."""
    log, records = Log(options.results), []
    for sizes in wanted:
        if records and time.monotonic() > options.deadline:
            print(f"{entry.label}: no time for more than {len(records)} candidates", file=sys.stderr, flush=True)
            break
        name = " ".join([options.device, *map(str, entry.shape), words(sizes)])
        records.append(log.of(name, functools.partial(measure, entry, sizes)))
        if "error" in records[-1]:
            print(f"{entry.label} {words(sizes)}: {records[-1]['error']}", file=sys.stderr, flush=True)
        if "error" in records[0]:
            break
    return records


def tune(
    wanted: Iterable[Entry],
    candidates_of: Callable[[Entry], Iterable[Sizes]],
    measure: Callable[[Entry, Sizes], Record],
    options: argparse.Namespace,
) -> list[Choice]:
    """Measures every candidate of every entry, and prints the choices as they are made."""
    chosen = []
    print(HEADER, flush=True)
    for entry in wanted:
        if time.monotonic() > options.deadline:
            print(f"{entry.label}: no time", file=sys.stderr, flush=True)
            continue
        chosen += (choices := choose(entry, measured(entry, candidates_of(entry), measure, options), options.margin))
        print("\n".join(choice.row for choice in choices), flush=True)
    return chosen


def parser(doc: str, devices: Iterable[str]) -> argparse.ArgumentParser:
    """The options that both tuners take."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("device", choices=sorted(devices))
    made.add_argument("--model", action="append", help="of shapes.py, repeatable; default: llama3-8b, llama3-70b")
    made.add_argument("--tp", action="append", type=int, help="tensor-parallel shards, repeatable; default: 1, 8")
    made.add_argument("--page", action="append", type=int, help="tokens of a page, repeatable; default: 128, 16")
    made.add_argument("--margin", type=float, default=0.03, help="share of the cost that an entry must save")
    made.add_argument("--results", type=Path, metavar="FILE", help="written after each candidate, and gone on from")
    made.add_argument("--out", type=Path, metavar="FILE", help="default: the file that the kernel reads")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the choices with all figures")
    made.add_argument("--timeout", type=float, default=400, metavar="SECONDS", help="of one candidate")
    made.add_argument(
        "--budget",
        dest="deadline",
        type=_deadline,
        default=math.inf,
        metavar="MINUTES",
        help="after which no candidate is begun; --results goes on from there",
    )
    made.add_argument("--list", action="store_true", help="print the entries and how many candidates they have")
    return made


def _deadline(text: str) -> float:
    """On the monotonic clock, of a number of minutes."""
    minutes = float(text)
    if not minutes > 0:
        raise argparse.ArgumentTypeError(f"expected more than 0 minutes, got {text}")
    return time.monotonic() + 60 * minutes


def list_entries(options: argparse.Namespace, candidates_of: Callable[[Entry], Iterable[Sizes]]) -> int:
    """What `--list` prints; the exit status."""
    for entry in entries_of(options):
        print(f"{entry.label}: {len(list(candidates_of(entry)))} candidates")
    return 0


def entries_of(options: argparse.Namespace) -> list[Entry]:
    """The entries that the options name.

    Raises:
        SystemExit: there is no such entry.
    """
    try:
        return entries(options.model or ("llama3-8b", "llama3-70b"), options.tp or (1, 8), options.page or (128, 16))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
