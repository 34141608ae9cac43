"""What both tuners share: the cases, results that survive an interruption, the choice, the table, the tuned files.

Flow:    shapes x TP x pages -> cases -> candidates -> measure, kept in [Log] -> [choose] -> Choice -> table, tuned file

What one measurement gives is a record, plain JSON: by part of the kernel (such as "decode" and "tiles", which have
sizes of their own) `{"sizes": {...}, "cost": number or None, ...}`, or `{"error": text}`. The first candidate of a case
is the kernel's formula: no sizes.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pallas_kernels.ragged_paged_attention.mask import MaskRule
from pallas_kernels.ragged_paged_attention.shapes import SHAPES, AttentionShape
from pallas_kernels.ragged_paged_attention.tuning import OP, TunedShape
from pallas_kernels.tuned import Sizes, Table, key_of, read_table

Record = dict[str, Any]
_COLUMNS = "{:30} {:7} {:38} {:>12} {:38} {:>12} {:>6}"
HEADER = _COLUMNS.format("case", "part", "formula", "cost", "best", "cost", "gain")


@dataclass(frozen=True)
class Case:
    """One entry to tune."""

    model: AttentionShape
    num_shards: int
    page_size: int
    page_dtype: str = "bfloat16"

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.model.name} / {self.num_shards}, page {self.page_size}"

    @property
    def mask(self) -> MaskRule:
        """Who sees what."""
        return MaskRule(True, self.model.sliding_window, self.model.attention_chunk_size)

    @property
    def shape(self) -> TunedShape:
        """What the tuned file calls it."""
        heads, kv_heads = self.model.per_shard(self.num_shards)
        sizes = (heads, kv_heads, self.model.head_dim, self.page_size)
        return TunedShape(
            *sizes, "bfloat16", self.page_dtype, self.model.sliding_window, self.model.attention_chunk_size
        )


@dataclass(frozen=True)
class Choice:
    """What came of one part of one case."""

    case: Case
    part: str
    formula: Record
    best: Record  # of least cost; the formula's where none beats it by the margin

    @property
    def gain(self) -> float:
        """Share of the formula's cost that is saved; 0 where the formula is kept."""
        return 1 - self.best["cost"] / self.formula["cost"] if self.is_tuned else 0.0

    @property
    def is_tuned(self) -> bool:
        """Whether it is worth an entry."""
        return self.best is not self.formula

    @property
    def row(self) -> str:
        """A line of the table."""
        cells = (cell for record in (self.formula, self.best) for cell in (_words(record["sizes"]), _cost(record)))
        return _COLUMNS.format(self.case.label, self.part, *cells, f"{self.gain:.1%}" if self.is_tuned else "kept")


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


def cases(models: Iterable[str], shards: Iterable[int], pages: Iterable[int]) -> list[Case]:
    """Those of the named models' layers; those that share an entry once.

    Raises:
        ValueError: a name is none of shapes.py, or its heads do not split into so many shards.
    """
    known, found = {shape.name: shape for shape in SHAPES}, {}
    for page_size in pages:
        for model in models:
            if model not in known:
                raise ValueError(f"expected a model out of {sorted(known)}, got {model!r}")
            for num_shards in shards:
                case = Case(known[model], num_shards, page_size)
                found.setdefault(case.shape, case)
    return list(found.values())


def candidates(*parts: Iterable[Sizes]) -> Iterator[Sizes]:
    """No sizes, then the parts' candidates side by side, since one measurement has every part."""
    yield {}
    for row in zip_longest(*parts, fillvalue={}):
        yield {name: size for sizes in row for name, size in sizes.items()}


def choose(case: Case, records: list[Record], margin: float) -> list[Choice]:
    """A choice for each part: the first of least cost, if that is at least `margin` (a share) below the formula's."""
    formula, tried = records[0], [record for record in records if "error" not in record]
    if "error" in formula:
        return []
    chosen = []
    for part, start in formula.items():
        costs = [record[part] for record in tried if part in record and record[part]["cost"] is not None]
        best = min(costs, key=lambda record: record["cost"], default=start)
        beats = start["cost"] is not None and best["cost"] <= (1 - margin) * start["cost"]
        chosen.append(Choice(case, part, start, best if beats else start))
    return chosen


def write_tuned(path: Path, by: str, size_names: tuple[str, ...], choices: Iterable[Choice]) -> None:
    """Puts the choices into a tuned file: a case's entry is replaced, or taken out where the formula is kept."""
    old = read_table(path, OP, TunedShape._fields, size_names) if path.exists() else Table(OP, path.stem, by)
    sizes: dict[TunedShape, dict[str, int]] = {}
    for choice in choices:
        sizes.setdefault(choice.case.shape, {}).update(choice.best["sizes"] if choice.is_tuned else {})
    entries = dict(old.entries)
    for shape, found in sizes.items():
        entries.pop(key_of(shape._asdict()), None)
        if found:
            entries[key_of(shape._asdict())] = (shape._asdict(), found)
    if entries or path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Table(OP, path.stem, by, entries).text())


def measured(
    case: Case, wanted: Iterable[Sizes], measure: Callable[[Case, Sizes], Record], options: argparse.Namespace
) -> list[Record]:
    """A record for each candidate, out of `options.results` where it is there; the first alone if that one fails."""
    log, records = Log(options.results), []
    for sizes in wanted:
        name = " ".join([options.device, *map(str, case.shape), _words(sizes)])
        records.append(log.of(name, functools.partial(measure, case, sizes)))
        if "error" in records[-1]:
            print(f"{case.label} {_words(sizes)}: {records[-1]['error']}", file=sys.stderr, flush=True)
        if "error" in records[0]:
            break
    return records


def tune(
    wanted: Iterable[Case],
    candidates_of: Callable[[Case], Iterable[Sizes]],
    measure: Callable[[Case, Sizes], Record],
    options: argparse.Namespace,
) -> list[Choice]:
    """Measures every candidate of every case, and prints the choices as they are made."""
    chosen = []
    print(HEADER, flush=True)
    for case in wanted:
        chosen += (choices := choose(case, measured(case, candidates_of(case), measure, options), options.margin))
        print("\n".join(choice.row for choice in choices), flush=True)
    return chosen


def as_json(choices: Iterable[Choice]) -> str:
    """The choices with all their figures."""
    rows = [
        {
            "case": choice.case.label,
            "shape": choice.case.shape._asdict(),
            "part": choice.part,
            "formula": choice.formula,
            "best": choice.best,
            "gain": choice.gain,
        }
        for choice in choices
    ]
    return json.dumps(rows, indent=1) + "\n"


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
    return made


def cases_of(options: argparse.Namespace) -> list[Case]:
    """The cases that the options name."""
    return cases(options.model or ("llama3-8b", "llama3-70b"), options.tp or (1, 8), options.page or (128, 16))


def _words(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in sizes.items())


def _cost(record: Record) -> str:
    return "-" if record["cost"] is None else f"{record['cost']:,.0f}"
