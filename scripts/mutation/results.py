"""Results as JSON lines, one per run of a change, and what is printed of them.

Flow:    Change, Outcome -> [Results] -> `--results FILE` -> resumed runs, the report
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mutation.runs import KILLED, NO_PROGRAM, Outcome
from mutation.sites import Change

IN_ROW = ("key", "path", "line", "function", "operator")


class Results:
    """The latest outcome of every change, in a file that each new one is appended to."""

    def __init__(self, path: Path, commit: str, seed: int) -> None:
        self._path = path
        self._of_run = {"commit": commit, "seed": seed}
        self._rows: dict[str, dict[str, Any]] = {}
        self.read()

    def read(self) -> None:
        """Reads what this or another process has appended."""
        if self._path.exists():
            rows = [json.loads(line) for line in self._path.read_text().splitlines()]
            self._rows = {row["key"]: row for row in rows}

    def outcome(self, change: Change) -> str:
        """The latest outcome, or "" before any."""
        return self._rows[change.key]["outcome"] if change.key in self._rows else ""

    def is_settled(self, change: Change, again: bool) -> bool:
        """Whether the change needs no run: it has one, and with `again` it was killed."""
        row = self._rows.get(change.key)
        return row is not None and (not again or row["outcome"] in (KILLED, NO_PROGRAM))

    def add(self, change: Change, outcome: Outcome, diff: list[str]) -> None:
        place = {name: value for name, value in asdict(change).items() if name in IN_ROW}
        row = place | {"diff": diff} | asdict(outcome) | self._of_run
        self._rows[change.key] = row
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
        print(f"{outcome.outcome:9} {change.path}:{change.line} {change.function} {change.operator}", end=" ")
        print(f"[{outcome.num_tests}/{outcome.num_selected} tests, {outcome.seconds:.1f} s] {outcome.test}", flush=True)

    def report(self, changes: list[Change], seconds: float) -> None:
        rows = [self._rows[change.key] for change in changes if change.key in self._rows]
        print(f"\nchanges that no test noticed, of {len(rows)}:")
        for row in rows:
            if row["outcome"] not in (KILLED, NO_PROGRAM):
                print(
                    f"{row['outcome']}: {row['path']}:{row['line']} in {row['function'] or 'the module'}  {row['key']}"
                )
                print("\n".join(f"    {line}" for line in row["diff"]))
        counts = Counter(row["outcome"] for row in rows)
        hung = sum(row["test"].startswith("hangs") for row in rows if row["outcome"] == KILLED)
        print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()), f"({hung} of them by time)")
        tested = sum(row["seconds"] for row in rows)
        print(
            f"seed {self._of_run['seed']}, commit {self._of_run['commit']}: {len(rows)} of {len(changes)} changes run,"
        )
        print(f"{tested / 60:.1f} minutes of tests in all, {seconds / 60:.1f} minutes by the clock in this call")


def diff_of(source: str, mutated: str) -> list[str]:
    """Changed lines, before and after."""
    diff = list(difflib.unified_diff(source.splitlines(), mutated.splitlines(), n=0, lineterm=""))
    return [f"{line[0]} {line[1:].strip()}" for line in diff[2:] if line[0] in "+-"]  # behind two lines of headings
