"""Requests one a row, each with its time and lengths, and hash ids or none.

Flow:    JSON lines, or rows of a table -> [read_requests] -> TraceRequest list
Source:  kvcache-ai/Mooncake, FAST25-release; alibaba-edu/qwen-bailian-usagetraces-anon: seconds, blocks of 16 tokens

Where no hash ids tell what prompts share, they share nothing. Rows that are not in order of time are sorted by it,
those of one millisecond as they stand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, repeat

from kvjax.errors import TraceError
from kvjax.replay.readers.prefixes import FileIds, Numbering, block_size_of
from kvjax.replay.readers.reading import ASSUMED_OUTPUT, TraceForm, TraceReading
from kvjax.replay.readers.source import Item
from kvjax.replay.readers.values import MAX_LENGTH, MAX_NUMBER, Columns, times_ms
from kvjax.replay.requests.trace import MAX_TOKENS, TRACE_BLOCK_SIZE, TraceRequest
from kvjax.text import count_of

Names = tuple[str, str, str]  # of time, prompt tokens and output tokens
NAMES: Names = ("timestamp", "input_length", "output_length")


def read_requests(
    items: Iterator[Item], limit: int | None, reading: TraceReading, names: Names = NAMES, *, is_table: bool = False
) -> tuple[list[TraceRequest], list[str]]:
    """The requests of the first `limit` rows and what was assumed. A table's times are seconds from its first row on.

    Rows of a table without prompt tokens, as failed requests have, are left out.

    Raises:
        TraceError: a row lacks a value that others have, or has a wrong one.
    """
    time, num_in, num_out = names
    optional = (num_out, "hash_ids", "hash_block_size", "after", "pause_ms")
    columns, notes = Columns.of(islice(items, limit), (time, num_in), optional), list[str]()
    if is_table and 0 in columns.by_name.get(num_in, ()):
        is_empty = [num == 0 for num in columns.by_name[num_in]]
        notes.append(f"{count_of(sum(is_empty), 'row')} without prompt tokens left out")
        columns = columns.without(is_empty)
    if not columns.places:
        return [], notes
    inputs = columns.integers(num_in, 1, MAX_LENGTH)
    outputs = _outputs(columns, num_out, notes)
    times = _times(columns, time, reading, is_table, notes)
    ids, size = _hash_ids(columns, inputs, reading, notes)
    requests = list(map(TraceRequest, times, inputs, outputs, ids, repeat(size), *_waits(columns)))
    return _in_order(columns.places, requests, notes), notes


def _outputs(columns: Columns, name: str, notes: list[str]) -> Sequence[int]:
    if name in columns.by_name:
        return columns.integers(name, 0, MAX_LENGTH)
    notes.append(f"no {name}: {ASSUMED_OUTPUT} tokens each assumed")
    return [ASSUMED_OUTPUT] * len(columns.places)


def _times(columns: Columns, name: str, reading: TraceReading, is_table: bool, notes: list[str]) -> Sequence[int]:
    times = columns.numbers(name)
    unit = "s" if is_table else reading.time_unit
    if unit is None:
        unit = _unit_of(columns.places, name, times)
        notes.append(f"times in {unit} unless --time-unit says otherwise")
    return times_ms(times, unit, from_first=is_table)


def _unit_of(places: Sequence[str], name: str, times: Sequence[float]) -> str:
    """Seconds where times have fractions, else milliseconds."""
    if set(map(type, times)) == {int} or not any(time % 1 for time in times):
        return "ms"
    for place, time in zip(places, times, strict=True):
        if type(time) is int and time:
            raise TraceError(
                f"{place}: expected {name} as integers (milliseconds) or with fractions (seconds), got {time} among "
                "fractions; give --time-unit"
            )
    return "s"


def _waits(columns: Columns) -> Iterator[Sequence[int]]:
    for name, least, most in (("after", -1, MAX_LENGTH), ("pause_ms", 0, int(MAX_NUMBER))):
        yield columns.integers(name, least, most) if name in columns.by_name else [least] * len(columns.places)


def _hash_ids(
    columns: Columns, inputs: Sequence[int], reading: TraceReading, notes: list[str]
) -> tuple[list[tuple[int, ...]], int]:
    """Ids by row, and the tokens of one."""
    places, given = columns.places, reading.hash_block_size
    if "hash_ids" not in columns.by_name:
        if given is not None:
            raise TraceError(f"{places[0]}: expected hash_ids with a hash block size of {given}, got none")
        notes.append("no hash ids: every prompt is distinct, so none hits another's cache")
        numbering = Numbering(TRACE_BLOCK_SIZE)
        return [tuple(numbering.fresh(-(-length // TRACE_BLOCK_SIZE))) for length in inputs], TRACE_BLOCK_SIZE
    if given is None and "hash_block_size" in columns.by_name:
        given, *others = sorted(set(columns.integers("hash_block_size", 1, MAX_TOKENS)))
        if others:
            raise TraceError(f"{places[0]}: expected one hash_block_size in all rows, got {given} and {others[0]}")
    ids = FileIds.of(places, columns.by_name["hash_ids"])
    size = block_size_of(places, inputs, ids, given)
    notes.append(f"hash blocks of {size} tokens{'' if given else ' unless --hash-block-size says otherwise'}")
    numbering = Numbering(size)
    found = numbering.prefixes(inputs, ids)
    if numbering.is_anew:
        notes.append("hash ids numbered anew by what is before them")
    return found, size


def _in_order(places: Sequence[str], requests: list[TraceRequest], notes: list[str]) -> list[TraceRequest]:
    times = [request.timestamp_ms for request in requests]
    is_sorted = times == sorted(times)
    for place, request in enumerate(requests):
        if request.after >= (place if is_sorted else 0):
            raise TraceError(
                f"{places[place]}: expected after as the place of an earlier row, from 0, in a file in order of time, "
                f"got {request.after}; sort the rows by time"
            )
    if is_sorted:
        return requests
    notes.append("rows sorted by time")
    return sorted(requests, key=lambda request: request.timestamp_ms)


REQUEST_LINES = TraceForm(
    "request lines (Mooncake, Qwen-Bailian)",
    '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}',
    ("hash_block_size", "time_unit"),
    lambda names: not names.isdisjoint(("input_length", "hash_ids")),
    read_requests,
)

__all__ = ["NAMES", "REQUEST_LINES", "Names", "read_requests"]
