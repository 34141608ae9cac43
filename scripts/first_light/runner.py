"""Runs rows one after the other, each in a process with a time limit, inside a budget.

Flow:    stages -> [run] -> processes -> Journal

An illegal access or a hang takes its process alone: one row is lost. A stage has a share of the budget; what one leaves
is the next one's. A row gets its own limit, and less where its stage ends before; a row that cannot start has no line
in the journal and runs the next time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.first_light.journal import DONE, FAILED, TIMEOUT, Journal, Record

ROOT = Path(__file__).resolve().parents[2]
LEAST_SECONDS = 5.0  # that a row is started with
_TAIL_LINES = 12


@dataclass(frozen=True)
class Row:
    """One process."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """Rows with one purpose, and the minutes of a whole budget that they may take."""

    name: str
    minutes: float
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Summary:
    """What became of the rows."""

    done: int = 0
    failed: int = 0
    skipped: int = 0  # for want of time


def run(
    stages: Sequence[Stage],
    journal: Journal,
    budget_s: float,
    *,
    retry: bool = False,
    say: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
) -> Summary:
    """Every row that the journal has no end of; those that failed too, with `retry`."""
    start, total = clock(), sum(stage.minutes for stage in stages)
    share, counts = 0.0, {DONE: 0, FAILED: 0, TIMEOUT: 0, "skipped": 0}
    for stage in stages:
        share += stage.minutes / total
        deadline = start + share * budget_s
        say(f"== {stage.name}, until {share * budget_s / 60:.1f} minutes from the start")
        for row in _order(stage.rows, journal, retry):
            left = deadline - clock()
            if left < LEAST_SECONDS:
                counts["skipped"] += 1
                say(f"   {row.name}: no time left in this stage")
                continue
            journal.start(row.name, stage.name)
            record = run_row(row, stage.name, min(row.limit_s, left))
            journal.end(record)
            counts[record.state] += 1
            say(line(record))
    return Summary(counts[DONE], counts[FAILED] + counts[TIMEOUT], counts["skipped"])


def _order(rows: Sequence[Row], journal: Journal, retry: bool) -> Iterator[Row]:
    """The rows to run: rows that an earlier run lost come last."""
    lost = journal.lost
    ended = {name for name, record in journal.records.items() if record.state == DONE or not retry}
    wanted = [row for row in rows if row.name not in ended]
    yield from (row for row in wanted if row.name not in lost)
    yield from (row for row in wanted if row.name in lost)


def run_row(row: Row, stage: str, limit_s: float) -> Record:
    """Its process, to the end or the limit; an interrupt kills it too."""
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **row.environment}
        process = subprocess.Popen(
            row.command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _kill(process)
        output.seek(0)
        lines = output.read().splitlines()
    state = TIMEOUT if status is None else DONE if status == 0 else FAILED
    tail = "" if state == DONE else "\n".join(lines[-_TAIL_LINES:])
    return Record(row.name, stage, state, round(time.monotonic() - start, 2), last_json(lines), tail)


def _kill(process: subprocess.Popen[Any]) -> None:
    """The process and its children, where they still run."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_json(lines: Sequence[str]) -> dict[str, Any]:
    """The last line that is a JSON object; {} without one."""
    for text in reversed(lines):
        if text.startswith("{"):
            try:
                return dict(json.loads(text))
            except json.JSONDecodeError:
                continue
    return {}


def line(record: Record) -> str:
    """A row's line on the terminal."""
    words = record.result.get("words") or ([""] + record.tail.splitlines())[-1]
    return f"   {record.state:8} {record.seconds:7.1f} s  {record.row:58} {words[:150]}"
