"""What a run has found, a JSON line for each event, so that the next run goes on from there.

Flow:    runner -> [Journal] <-> results.jsonl -> report

A row has two lines: {"row", "stage", "state": "started"} before its process, and one with state "done", "failed" or
"timeout", its seconds, the JSON that its program printed last, and the end of its output where it failed. A row that
has the first line alone was under way when a run was killed: its work is lost, and it runs again, after the others.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STARTED, DONE, FAILED, TIMEOUT = "started", "done", "failed", "timeout"


@dataclass(frozen=True)
class Record:
    """How a row ended."""

    row: str
    stage: str
    state: str
    seconds: float = 0.0
    result: dict[str, Any] = field(default_factory=dict)
    tail: str = ""  # of the output, where it failed


class Journal:
    """The events of a file, and those to come."""

    def __init__(self, path: Path) -> None:
        """Reads what is there; a line that a kill tore off is left out.

        Raises:
            ValueError: a line is whole JSON and no event.
        """
        self.path = path
        self.records: dict[str, Record] = {}
        self._started: set[str] = set()
        text = path.read_text() if path.exists() else ""
        for line in text.splitlines():
            self._take(line)
        if text and not text.endswith("\n"):
            self._append("")

    @property
    def lost(self) -> set[str]:
        """Rows that began and did not end."""
        return self._started - set(self.records)

    def start(self, row: str, stage: str) -> None:
        """Before the row's process."""
        self._started.add(row)
        self._append(json.dumps({"row": row, "stage": stage, "state": STARTED}))

    def end(self, record: Record) -> None:
        """After it."""
        self.records[record.row] = record
        self._append(json.dumps(record.__dict__))

    def _take(self, line: str) -> None:
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            return
        try:
            if event["state"] == STARTED:
                self._started.add(event["row"])
            else:
                self.records[event["row"]] = Record(**event)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{self.path}: expected events of first_light, got {line[:80]!r}") from error

    def _append(self, line: str) -> None:
        with self.path.open("a") as file:
            file.write(line + "\n")
