"""Columns of trace files, checked: what a bad value is, at which place, and what would be right.

Flow:    items of a file -> [Columns] -> readers
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import itemgetter
from typing import Any

from kvjax.errors import TraceError
from kvjax.replay.readers.source import Item

MAX_LENGTH = 2**31 - 1  # tokens of a prompt or an answer: int32
MAX_NUMBER = 2**53 / 1e3  # seconds or milliseconds: float64 tells integers apart below it
YEAR_MS = 366 * 24 * 3_600_000
UNITS = {"ms": 1, "s": 1_000}  # of timestamps, in milliseconds


@dataclass(frozen=True)
class Columns:
    """Values of rows by name, and the rows' places."""

    places: Sequence[str]
    by_name: Mapping[str, Sequence[Any]]

    @classmethod
    def of(cls, items: Iterable[Item], required: Sequence[str], optional: Sequence[str]) -> Columns:
        """Columns of rows that all have what is required, and of the optional names all those of the first row."""
        names: list[str] = []
        absent: set[str] = set()
        places: list[str] = []
        rows: list[tuple[Any, ...]] = []
        for place, data in items:
            if not places:
                names = [*required, *(name for name in optional if name in data)]
                absent = set(optional).difference(names)
                values_of = itemgetter(*names, names[0])  # two at least, so that it gives tuples
            try:
                rows.append(values_of(data))
            except KeyError as error:
                raise TraceError(f"{place}: expected the key {error}, got {str(list(data))[:80]}") from None
            if not absent.isdisjoint(data):
                raise TraceError(
                    f"{place}: expected {', '.join(sorted(absent & set(data)))} in all rows or none, got it here and "
                    f"not at {places[0]}"
                )
            places.append(place)
        return cls(places, dict(zip(names, zip(*rows, strict=True), strict=False)))

    def integers(self, name: str, least: int, most: int) -> Sequence[int]:
        """The values of a column, if all are integers from `least` to `most`."""
        values = self.by_name[name]
        if set(map(type, values)) != {int} or min(values) < least or max(values) > most:
            for place, value in zip(self.places, values, strict=True):
                if type(value) is not int or value < least:
                    raise TraceError(f"{place}: expected {name} to be an integer >= {least}, got {repr(value)[:40]}")
                if value > most:
                    raise TraceError(f"{place}: expected {name} <= {most}, got {repr(value)[:40]}")
        return values

    def numbers(self, name: str) -> Sequence[float]:
        """The values of a column, if all are numbers from 0 to MAX_NUMBER."""
        values = self.by_name[name]
        if set(map(type, values)) - {int, float} or not all(0 <= value <= MAX_NUMBER for value in values):
            for place, value in zip(self.places, values, strict=True):
                if type(value) not in (int, float) or not 0 <= value <= MAX_NUMBER:
                    raise TraceError(
                        f"{place}: expected {name} to be a number from 0 to {MAX_NUMBER:g}, got {repr(value)[:40]}"
                    )
        return values

    def without(self, unwanted: Sequence[bool]) -> Columns:
        """The same without some rows."""
        wanted = [not one for one in unwanted]
        columns = {name: list(compress(values, wanted)) for name, values in self.by_name.items()}
        return replace(self, places=list(compress(self.places, wanted)), by_name=columns)


def times_ms(times: Sequence[float], unit: str, *, from_first: bool) -> Sequence[int]:
    """Times of a unit in milliseconds; dates, as numbers of more than a year, count from the first."""
    scale, first = UNITS[unit], min(times)
    start = first if from_first or first * scale >= YEAR_MS else 0
    if scale == 1 and not start and set(map(type, times)) == {int}:
        return times  # type: ignore[return-value]
    return [round((time - start) * scale) for time in times]


__all__ = ["MAX_LENGTH", "MAX_NUMBER", "UNITS", "Columns", "times_ms"]
