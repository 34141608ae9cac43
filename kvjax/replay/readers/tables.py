"""CSV tables of times and lengths.

Flow:    CSV lines -> [table_rows] -> rows -> kvjax.replay.readers.requests
Source:  Azure/AzurePublicDataset, of 2023 and 2024 and the multimodal one of 2025; HPMLL/BurstGPT, with sessions and
         without

Names of columns count without case and spaces around them; other columns are ignored.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from kvjax.errors import TraceError
from kvjax.replay.readers.reading import TraceForm
from kvjax.replay.readers.requests import NAMES, Names, read_requests
from kvjax.replay.readers.source import Item, Line


def table_names(line: str) -> tuple[str, ...]:
    """Names of the columns, in small letters."""
    return tuple(name.strip().lower() for name in _cells(line, "the first line"))


def table_rows(path: str | Path, lines: Iterable[Line], names: Names) -> Iterator[Item]:
    """Rows below the header, with a number of seconds and two integers under `names`.

    Raises:
        TraceError: a row has too few or too many cells, or one that is no time or integer.
    """
    lines = iter(lines)
    header = table_names(next(lines)[1])
    time, num_in, num_out = (header.index(name.lower()) for name in names)
    for number, line in lines:
        place = f"{path}:{number}"
        cells = _cells(line, place)
        if len(cells) != len(header):
            raise TraceError(f"{place}: expected {len(header)} cells as the header has, got {len(cells)}")
        values = _seconds(cells[time], place), _integer(cells[num_in]), _integer(cells[num_out])
        yield place, dict(zip(names, values, strict=True))


def _cells(line: str, place: str) -> list[str]:
    try:
        return next(csv.reader([line]))
    except csv.Error as error:
        raise TraceError(f"{place}: expected cells separated by commas, got {line[:40]!r} ({error})") from error


def _seconds(cell: str, place: str) -> float:
    """Seconds of a number, or of a date, which counts as UTC where it does not say."""
    try:
        return float(cell)
    except ValueError:
        pass
    try:
        date = datetime.fromisoformat(cell.strip())
    except ValueError as error:
        raise TraceError(f"{place}: expected a time in seconds or as a date, got {cell[:40]!r}") from error
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def _integer(cell: str) -> int | str:
    """The cell's integer, or the cell: whoever checks it knows its name."""
    try:
        return int(cell)
    except ValueError:
        return cell


def _form(name: str, look: str, names: Names) -> TraceForm:
    lower = frozenset(name.lower() for name in names)
    return TraceForm(name, look, (), lower.issubset, partial(read_requests, names=names, is_table=True))


TABLES = {
    names: _form(name, look, names)
    for name, look, names in (
        (
            "Azure's LLM inference table",
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
        ),
        (
            "BurstGPT's table",
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
            ("Timestamp", "Request tokens", "Response tokens"),
        ),
        ("table", "timestamp,input_length,output_length", NAMES),
    )
}

__all__ = ["TABLES", "table_names", "table_rows"]
