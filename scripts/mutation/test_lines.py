"""Which lines of the mutated folder each test runs, and how long each test takes: recorded once, kept in a file.

Flow:    sys.monitoring (Python 3.12 or newer) -> [LineRecorder] -> TestLines -> selected(change)

A line's first execution in a test is an event; the interpreter then skips the line until the next test begins, so that
recording costs little. What is recorded of a module holds while the module's source and the test's file stand.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from mutation.sites import Change, modules_in


@dataclass
class TestRecord:
    """One test: seconds, and per module its lines as a bit mask in hex."""

    __test__ = False

    seconds: float
    lines: dict[str, str]

    def runs(self, path: str, lines: tuple[int, ...]) -> bool:
        mask = int(self.lines.get(path, "0"), 16)
        return any(mask >> line & 1 for line in lines)


@dataclass
class TestLines:
    """What every test runs; `at_import` is what runs when the tests are collected."""

    __test__ = False

    hashes: dict[str, str] = field(default_factory=dict)  # of sources: modules and test files
    at_import: dict[str, str] = field(default_factory=dict)
    tests: dict[str, TestRecord] = field(default_factory=dict)  # by node id

    @classmethod
    def read(cls, path: Path) -> TestLines:
        if not path.exists():
            return cls()
        stored = json.loads(path.read_text())
        return cls(
            stored["hashes"], stored["at_import"], {name: TestRecord(**t) for name, t in stored["tests"].items()}
        )

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))

    def stale(self, node_ids: list[str], hashes: dict[str, str]) -> list[str]:
        """Tests to record: new ones, those of changed files, those that run a changed module."""
        changed = {path for path, digest in hashes.items() if self.hashes.get(path) != digest}
        return [
            name
            for name in node_ids
            if name not in self.tests or name.split("::")[0] in changed or changed & self.tests[name].lines.keys()
        ]

    def selected(self, change: Change, node_ids: list[str]) -> list[str]:
        """The tests that run the changed statement; those of its room first.

        If it runs at import: those that run its module, or that run nothing, since they look at what import made.

        The quickest case of every test function comes before any second case, since cases fail together.
        """
        own = f"tests/{'/'.join(change.path.split('/')[1:-1])}/"  # kvjax/core/pool/block.py: tests/core/pool/
        records = [(self.tests[name], name) for name in node_ids]
        if self.runs_at_import(change):
            found = [(r.seconds, name) for r, name in records if change.path in r.lines or not r.lines]
        else:
            found = [(record.seconds, name) for record, name in records if record.runs(change.path, change.lines)]
        cases: dict[str, int] = defaultdict(int)
        order = []
        for seconds, name in sorted(found):
            function = name.split("[")[0]
            order.append((not name.startswith(own), min(cases[function], 1), seconds, name))
            cases[function] += 1
        return [name for *_, name in sorted(order)]

    def runs_at_import(self, change: Change) -> bool:
        mask = int(self.at_import.get(change.path, "0"), 16)
        return change.at_import or any(mask >> line & 1 for line in change.lines)


def source_hashes(root: Path, *places: str) -> dict[str, str]:
    paths = modules_in(root, places)
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in paths}


class LineRecorder:
    """Collects the lines of one folder that run between `start` and `stop`."""

    def __init__(self, root: Path, folder: str) -> None:
        self._prefix = f"{root / folder}/"
        self._root = f"{root}/"
        self._lines: dict[str, set[int]] = defaultdict(set)
        self._began = 0.0
        monitoring = sys.monitoring
        monitoring.use_tool_id(monitoring.COVERAGE_ID, "mutate_core")
        monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, self._on_line)

    def start(self) -> None:
        self._lines.clear()
        sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE)
        sys.monitoring.restart_events()
        self._began = time.process_time()

    def stop(self) -> TestRecord:
        seconds = time.process_time() - self._began
        sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, 0)
        masks = {path.removeprefix(self._root): _mask(lines) for path, lines in self._lines.items()}
        return TestRecord(round(seconds, 4), masks)

    def _on_line(self, code: CodeType, line: int) -> Any:
        if code.co_filename.startswith(self._prefix):
            self._lines[code.co_filename].add(line)
        return sys.monitoring.DISABLE


def _mask(lines: set[int]) -> str:
    mask = 0
    for line in lines:
        mask |= 1 << line
    return f"{mask:x}"
