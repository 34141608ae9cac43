"""Which sizes an entry gets, by what was measured; the table of choices and the tuned file.

Flow:    Entry + records -> [choose] -> Choice -> table, tuned file

What one measurement gives is a record, plain JSON: by part of the kernel (such as "decode" and "tiles", which have
sizes of their own) `{"sizes": {...}, "cost": number or None, ...}`, or `{"error": text}`; "cost_at_latencies", where a
part has it, is its cost by latency. The first candidate of an entry is the kernel's formula: no sizes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pallas_kernels.ragged_paged_attention.tuning import OP, TunedShape
from pallas_kernels.tuned import Table, key_of, read_table
from scripts.lab.tuning.entries import Entry

Record = dict[str, Any]
_COLUMNS = "{:30} {:7} {:38} {:>12} {:38} {:>12} {:>6}"
HEADER = _COLUMNS.format("case", "part", "formula", "cost", "best", "cost", "gain")


@dataclass(frozen=True)
class Choice:
    """What came of one part of one entry."""

    entry: Entry
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
        cells = (cell for record in (self.formula, self.best) for cell in (words(record["sizes"]), _cost(record)))
        return _COLUMNS.format(self.entry.label, self.part, *cells, f"{self.gain:.1%}" if self.is_tuned else "kept")


def choose(entry: Entry, records: list[Record], margin: float) -> list[Choice]:
    """A choice for each part: the first of least cost, if that is at least `margin` (a share) below the formula's.

    A candidate that costs over `margin` more than the formula at any of its latencies is none.
    """
    formula, tried = records[0], [record for record in records if "error" not in record]
    if "error" in formula:
        return []
    chosen = []
    for part, start in formula.items():
        costs = [record[part] for record in tried if part in record and record[part]["cost"] is not None]
        costs = [record for record in costs if _loses_nowhere(record, start, margin)]
        best = min(costs, key=lambda record: record["cost"], default=start)
        beats = start["cost"] is not None and best["cost"] <= (1 - margin) * start["cost"]
        chosen.append(Choice(entry, part, start, best if beats else start))
    return chosen


def _loses_nowhere(record: Record, formula: Record, margin: float) -> bool:
    of_formula = formula.get("cost_at_latencies", {})
    return all(cost <= (1 + margin) * of_formula[at] for at, cost in record.get("cost_at_latencies", {}).items())


def write_tuned(path: Path, by: str, size_names: tuple[str, ...], choices: Iterable[Choice]) -> None:
    """Puts the choices into a tuned file: an entry is replaced, or taken out where the formula is kept."""
    old = read_table(path, OP, TunedShape._fields, size_names) if path.exists() else Table(OP, path.stem, by)
    sizes: dict[TunedShape, dict[str, int]] = {}
    for choice in choices:
        sizes.setdefault(choice.entry.shape, {}).update(choice.best["sizes"] if choice.is_tuned else {})
    entries = dict(old.entries)
    for shape, found in sizes.items():
        entries.pop(key_of(shape._asdict()), None)
        if found:
            entries[key_of(shape._asdict())] = (shape._asdict(), found)
    if entries or path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Table(OP, path.stem, by, entries).text())


def as_json(choices: Iterable[Choice]) -> str:
    """The choices with all their figures."""
    rows = [
        {
            "case": choice.entry.label,
            "shape": choice.entry.shape._asdict(),
            "part": choice.part,
            "formula": choice.formula,
            "best": choice.best,
            "gain": choice.gain,
        }
        for choice in choices
    ]
    return json.dumps(rows, indent=1) + "\n"


def words(sizes: Mapping[str, int]) -> str:
    """The sizes as name=size, for people."""
    return " ".join(f"{name}={size}" for name, size in sizes.items())


def _cost(record: Record) -> str:
    return "-" if record["cost"] is None else f"{record['cost']:,.0f}"
