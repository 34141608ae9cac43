"""Runs of selected tests, one forked process per change: killed, survived, cut off, or run by no test.

Flow:    pytest collects -> [Collected] -> per change: fork, patch, selected tests until one fails -> Outcome

Processor time limits a run, not the clock: the machine is shared. A test that takes ten times as long as recorded, and
five seconds at least, hangs; the change is killed. `CUT` runs out of time before every test that might fail has run.
Hypothesis draws the same examples in every run, stores none and shrinks none.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mutation.functions import CannotPatchError, FunctionsByCode, functions_by_code, import_changed, patch_functions
from mutation.sites import Change
from mutation.test_lines import LineRecorder, TestLines, TestRecord

KILLED, SURVIVED, CUT, NO_TEST, NO_PROGRAM = "killed", "survived", "cut", "no test", "no program"
MAX_ADDRESS_BYTES = 6 << 30
WALL_FACTOR = 60  # a child that sleeps uses no processor time: after so many limits it is killed all the same


@dataclass(frozen=True)
class Outcome:
    """What the tests said about one change."""

    outcome: str
    test: str = ""  # that failed, or ran when time was up
    num_tests: int = 0  # that were run
    num_selected: int = 0
    seconds: float = 0.0  # of processor time


class Collected:
    """pytest plugin: after collection it records lines and runs changes, each in a fork of this process."""

    def __init__(
        self, root: Path, folder: str, lines: TestLines, limit: float, work: Callable[[Collected], None]
    ) -> None:
        self._root = root
        self._folder = folder
        self.lines = lines
        self._limit = limit
        self._work = work
        self._items: dict[str, pytest.Item] = {}
        self._functions: FunctionsByCode = {}
        self._report: _Child | None = None
        self._recorder: LineRecorder | None = None

    @property
    def node_ids(self) -> list[str]:
        return list(self._items)

    def pytest_collection(self) -> None:
        hypothesis = importlib.import_module("hypothesis")
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile(
            "mutation", parent=hypothesis.settings(), database=None, derandomize=True, phases=phases
        )
        hypothesis.settings.load_profile("mutation")
        self._recorder = LineRecorder(self._root, self._folder)
        self._recorder.start()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        assert self._recorder is not None
        if session.testsfailed:  # a test module that cannot be imported
            return True
        self.lines.at_import = self._recorder.stop().lines
        self._items = {item.nodeid: item for item in session.items}
        self._functions = functions_by_code(self._root / self._folder)
        self._work(self)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._report is not None and report.failed:
            self._report.finish(KILLED)

    def record(self, node_ids: list[str], jobs: int) -> dict[str, TestRecord]:
        """Runs tests in forks and returns what each ran."""
        with tempfile.TemporaryDirectory() as folder:
            parts = [Path(folder) / str(share) for share in range(jobs)]
            in_forks(jobs, lambda share: self._record(node_ids[share::jobs], parts[share]))
            rows = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
        return {name: TestRecord(seconds, lines) for name, seconds, lines in rows}

    def _record(self, node_ids: list[str], path: Path) -> None:
        assert self._recorder is not None
        _silence()
        with path.open("w") as out:
            for name in node_ids:
                self._recorder.start()
                self._run_item(self._items[name], None)
                record = self._recorder.stop()
                out.write(json.dumps([name, record.seconds, record.lines]) + "\n")

    def run(self, change: Change) -> Outcome:
        """Tests one change in a fork."""
        selected = self.lines.selected(change, self.node_ids)
        if not selected:
            return Outcome(NO_TEST)
        path = self._root / change.path
        source = path.read_text()
        mutated = change.mutated(source)

        def child(report: _Child) -> None:
            patch_functions(path, source, mutated, self._functions)
            self._run_selected(selected, report)

        return in_child(child, self._limit)

    def run_all(self, selected: list[str], report: _Child) -> None:
        """Runs the selected tests in this process, which has imported the changed module."""
        self._run_selected([name for name in selected if name in self._items], report)

    def _run_selected(self, selected: list[str], report: _Child) -> None:
        self._report = report
        report.num_selected = len(selected)
        following = [self._items[name] for name in selected[1:]]
        for name, next_item in zip(selected, [*following, None], strict=True):
            report.begin(name, self.lines.tests[name].seconds)
            self._run_item(self._items[name], next_item)
        report.finish(SURVIVED)

    def _run_item(self, item: pytest.Item, next_item: pytest.Item | None) -> None:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)


class _Child:
    """In the forked process: writes the outcome and ends the process, by failure, by time or when all is run."""

    def __init__(self, write: int, limit: float) -> None:
        self._write = write
        self._limit = limit
        self._began = time.process_time()
        self._test = ""
        self.num_tests = 0
        self.num_selected = 0
        signal.signal(signal.SIGPROF, self._hangs)

    def begin(self, test: str, seconds: float) -> None:
        if time.process_time() - self._began > self._limit:
            self.finish(CUT)
        self._test = test
        self.num_tests += 1
        signal.setitimer(signal.ITIMER_PROF, max(5.0, 10 * seconds))

    def finish(self, outcome: str, note: str = "") -> None:
        seconds = round(time.process_time() - self._began, 2)
        test = "" if outcome == SURVIVED else note + self._test
        parts = [outcome, test, self.num_tests, self.num_selected, seconds]
        os.write(self._write, json.dumps(parts).encode())
        os._exit(0)

    def _hangs(self, *_: Any) -> None:
        self.finish(KILLED, "hangs: ")


def in_child(body: Callable[[_Child], None], limit: float) -> Outcome:
    """Runs `body` in a fork; a child that ends without a word was killed by what it ran."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(read)
        _silence()
        resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_BYTES, MAX_ADDRESS_BYTES))
        report = _Child(write, limit)
        try:
            body(report)
        except CannotPatchError as error:
            report.finish("cannot patch", f"{error}: ")
        except SyntaxError:
            report.finish(NO_PROGRAM)
        finally:
            report.finish(KILLED, "process ends: ")
    os.close(write)
    deadline = time.monotonic() + WALL_FACTOR * limit
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
        time.sleep(0.02)
    with os.fdopen(read) as stream:
        text = stream.read()
    return Outcome(*json.loads(text)) if text else Outcome(KILLED, "hangs, or the process ends: by the clock")


def in_forks(jobs: int, body: Callable[[int], object]) -> None:
    """Runs `body(0)` to `body(jobs - 1)`, each in a fork of this process, and waits for all."""
    pids = []
    for share in range(jobs):
        if (pid := os.fork()) == 0:
            try:
                body(share)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


def run_import(change: Change, root: Path, folder: str, lines: TestLines, limit: float) -> Outcome:
    """Tests a change of what runs at import: a fork that imports everything itself."""
    selected = lines.selected(change, list(lines.tests))
    if not selected:
        return Outcome(NO_TEST)
    path = root / change.path
    mutated = change.mutated(path.read_text())
    files = sorted({name.split("::")[0] for name in selected})

    def child(report: _Child) -> None:
        name = change.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        import_changed(name, path, mutated)
        plugin = Collected(root, folder, lines, limit, lambda collected: collected.run_all(selected, report))
        collect(files, plugin)

    return in_child(child, limit)


def collect(tests: list[str], plugin: Collected) -> int:
    """Runs pytest on `tests` with the plugin in this process."""
    arguments = ["-q", "--capture=sys", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=0", *tests]
    return int(pytest.main(arguments, plugins=[plugin]))


def _silence() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.dup2(null, sys.stderr.fileno())
