"""Any trace file: which form it has, by its first row, and its requests.

Flow:    file -> [read_trace] -> TraceRequest list, a line on what was recognised and assumed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from kvjax.errors import TraceError
from kvjax.replay.garbage import no_garbage_collection
from kvjax.replay.readers.agents import AGENTS
from kvjax.replay.readers.reading import AS_IT_SAYS, TraceForm, TraceReading
from kvjax.replay.readers.requests import REQUEST_LINES
from kvjax.replay.readers.source import Item, Line, json_objects, numbered_lines
from kvjax.replay.readers.tables import TABLES, table_names, table_rows
from kvjax.replay.readers.texts import CONVERSATIONS, PROMPTS
from kvjax.replay.requests.trace import TraceRequest
from kvjax.text import count_of

_OBJECTS = (REQUEST_LINES, AGENTS, CONVERSATIONS, PROMPTS)


def read_trace(
    path: str | Path,
    limit: int | None = None,
    reading: TraceReading = AS_IT_SAYS,
    tell: Callable[[str], object] = lambda line: None,
) -> list[TraceRequest]:
    """The requests of a trace file of any known form, plain or gzipped, the first `limit` of them if it is given.

    `tell` gets one line: the form that was recognised, and what was assumed where the file does not say.

    Raises:
        TraceError: an unknown form, which names those that are known; a bad row, with its line or place; an option of
            `reading` that the form does not take; or no request at all.
        OSError: the file cannot be read.
    """
    lines = numbered_lines(path)
    first = next(lines, None)
    if first is None:
        raise TraceError(f"{path}: expected at least one request, got none")
    form, items = _recognised(path, first, chain([first], lines))
    for name, value in vars(reading).items():
        if value is not None and name not in form.options:
            raise TraceError(f"{path}: expected no {name} for {form.name}, got {value}; leave it out")
    with no_garbage_collection():
        requests, notes = form.read(items, limit, reading)
    if not requests:
        raise TraceError(f"{path}: expected at least one request, got none")
    tell(f"{path}: {form.name}, {count_of(len(requests), 'request')}; {'; '.join(notes)}")
    return requests


def _recognised(path: str | Path, first: Line, lines: Iterator[Line]) -> tuple[TraceForm, Iterator[Item]]:
    """The form of a file, and its rows."""
    start = first[1].lstrip()
    if start.startswith(("{", "[")):
        items = json_objects(path, lines)
        item = next(items, None)
        if item is None:
            raise TraceError(f"{path}: expected at least one request, got none")
        names = frozenset(item[1])
        found = next((form for form in _OBJECTS if form.matches(names)), None)
        if found is not None:
            return found, chain([item], items)
    else:
        names = frozenset(table_names(start))
        for columns, form in TABLES.items():
            if form.matches(names):
                return form, table_rows(path, lines, columns)
    looks = "; ".join(f"{form.name}: {form.look}" for form in (*_OBJECTS, *TABLES.values()))
    raise TraceError(
        f"{path}: expected a trace of a known form, got {start.strip()[:60]!r}; write a line "
        '{"timestamp": milliseconds, "input_length": tokens} for each request, with output_length and hash_ids if you '
        f"have them; known forms are {looks}"
    )


__all__ = ["read_trace"]
