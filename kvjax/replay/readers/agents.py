"""Sessions of agents: tool loops with their thinking times, sub-agents beside their main agent.

Flow:    JSON lines, a session each -> [AGENTS] -> sessions -> at_once
Source:  callanjfox/kv-cache-tester, traces; its sessions rewritten with runs of ids

    {"block_size": 64, "requests": [{"t": 9.0, "in": 640, "out": 15, "think": 3.0, "api": 3.4, "agent": null,
     "runs": [[1, 10]]}, ...]}

A run is a first id and how many there are; `hash_ids`, `think_time` and `api_time` are other names. A sub-agent's
requests may be a list of their own among a session's, with times from its `t` on. Ids count within their session,
unless its `hash_id_scope` is global. A request waits for the answer to its agent's request before, then pauses for its
thinking time; an agent's first waits for the session's request before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from kvjax.errors import TraceError
from kvjax.replay.readers.prefixes import FileIds, Numbering, block_size_of
from kvjax.replay.readers.reading import TraceForm, TraceReading
from kvjax.replay.readers.sessions import ANSWER_TOKENS_PER_S, Turn, at_once
from kvjax.replay.readers.source import Item
from kvjax.replay.readers.values import MAX_LENGTH, Columns
from kvjax.replay.requests.trace import MAX_TOKENS, TraceRequest

LONGEST_PAUSE_S = 600.0
_ANSWERS, _THINKING = ("api", "api_time"), ("think", "think_time")


def _read(items: Iterator[Item], limit: int | None, reading: TraceReading) -> tuple[list[TraceRequest], list[str]]:
    first, items = _peeked(items)
    size = reading.hash_block_size or _block_size(first)
    numbering = Numbering(size)
    shared: dict[tuple[int, int], int] | None = {} if first[1].get("hash_id_scope") == "global" else None

    def sessions() -> Iterator[list[Turn]]:
        for item in items:
            if reading.hash_block_size is None and _block_size(item) != size:
                raise TraceError(f"{item[0]}: expected block_size {size} as before, got {_block_size(item)}")
            yield _turns(item, numbering, shared)

    notes = [
        reading.users_note,
        f"hash blocks of {size} tokens",
        f"no session shares a prompt with another{'' if shared is None else ' but by ids'}",
        f"pauses of at most {LONGEST_PAUSE_S:g} s",
    ]
    return at_once(sessions(), reading.num_users, size, limit), notes


def _peeked(items: Iterator[Item]) -> tuple[Item, Iterator[Item]]:
    first = next(items)
    return first, chain([first], items)


def _block_size(item: Item) -> int:
    return Columns.of([item], ("block_size",), ()).integers("block_size", 1, MAX_TOKENS)[0]


def _turns(item: Item, numbering: Numbering, shared: dict[tuple[int, int], int] | None) -> list[Turn]:
    """The requests of a session, in order of time."""
    rows = sorted(_rows(item), key=lambda row: row[1]["t"])
    columns = Columns.of(rows, ("t", "in", "out", "agent"), (*_ANSWERS, *_THINKING, "runs", "hash_ids"))
    inputs, outputs = columns.integers("in", 1, MAX_LENGTH), columns.integers("out", 0, MAX_LENGTH)
    ids = numbering.prefixes(inputs, _ids(columns, inputs, numbering.hash_block_size), shared)
    answers = _seconds(columns, _ANSWERS) or [num / ANSWER_TOKENS_PER_S for num in outputs]
    return list(map(Turn, inputs, outputs, ids, answers, *_waits(columns, answers)))


def _rows(item: Item, start_s: float = 0.0, agent: str | None = None) -> Iterator[Item]:
    """The requests of a session or, with their agent, of a sub-agent; each with its time in the session."""
    place, session = item
    entries = session.get("requests")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise TraceError(f"{place}: expected requests to be a list of objects, at least one, got {str(entries)[:40]}")
    rows = [(f"{place}, request {number}", entry) for number, entry in enumerate(entries)]
    for row, time_s in zip(rows, Columns.of(rows, ("t",), ()).numbers("t"), strict=True):
        if "requests" in row[1] and agent is None:
            yield from _rows(row, start_s + time_s, f"{row[1].get('agent_id')} of {row[0]}")
        else:
            yield row[0], {"agent": agent, **row[1], "t": start_s + time_s}


def _waits(columns: Columns, answers: Sequence[float]) -> tuple[list[int], list[float]]:
    """For whose answer each request waits, and how long after it."""
    starts, thinking = columns.numbers("t"), _seconds(columns, _THINKING)
    agents = map(json.dumps, columns.by_name["agent"])
    last: dict[str, int] = {}  # of each agent
    afters: list[int] = []
    pauses: list[float] = []
    for number, agent in enumerate(agents):
        before = last.get(agent, number - 1)
        if agent in last and thinking is not None:
            pause_s = thinking[number]
        elif number:
            pause_s = max(starts[number] - starts[before] - answers[before], 0.0)
        else:
            pause_s = 0.0
        last[agent] = number
        afters.append(before)
        pauses.append(min(pause_s, LONGEST_PAUSE_S))
    return afters, pauses


def _seconds(columns: Columns, names: Sequence[str]) -> Sequence[float] | None:
    """Numbers under the first of `names` that there is."""
    name = next((name for name in names if name in columns.by_name), None)
    return None if name is None else columns.numbers(name)


def _ids(columns: Columns, inputs: Sequence[int], size: int) -> FileIds:
    """Ids of the file, by request."""
    places, values = columns.places, columns.by_name.get("hash_ids")
    if values is None:
        runs = columns.by_name.get("runs", [None])
        values = [_spread(place, one, -(-num // size)) for place, one, num in zip(places, runs, inputs, strict=False)]
    ids = FileIds.of(places, values)
    block_size_of(places, inputs, ids, size)
    return ids


def _spread(place: str, runs: Any, most: int) -> list[int]:
    """The ids of runs, of which there can be `most`."""
    if not isinstance(runs, list) or not all(_is_run(run) for run in runs) or sum(num for _, num in runs) > most:
        raise TraceError(f"{place}: expected runs as [first id, number of ids], {most} in all, got {str(runs)[:40]}")
    return list(chain.from_iterable(range(first, first + num) for first, num in runs))


def _is_run(run: Any) -> bool:
    return isinstance(run, list) and len(run) == 2 and all(type(value) is int and value >= 0 for value in run)


AGENTS = TraceForm(
    "sessions of agents",
    '{"block_size": 64, "requests": [{"t": 9.0, "in": 640, "out": 15, "think": 3.0, "api": 3.4, "runs": [[1, 10]]}]}',
    ("hash_block_size", "users"),
    lambda names: "requests" in names,
    _read,
)

__all__ = ["AGENTS"]
