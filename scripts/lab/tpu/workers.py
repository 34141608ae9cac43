"""Processes that compile one case after another without dumps: what a process costs to start is paid once.

Flow:    chip + op + settings -> [Workers.compile] -> compile_one.serve in a process that is free -> memory

A compiler that dies or does not end costs its process and the one case; the next case gets a new process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from scripts.lab.tpu.compiler import ROOT, Compilation, CompilationError, environment, last_lines
from scripts.lab.tpu.libtpu import Release


class _Worker:
    """One process, started when a case needs it."""

    def __init__(self, libtpu: Release | None) -> None:
        self._environment = environment(libtpu)
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="kvjax-tpu-worker-")
        self._stderr = Path(self._folder.name) / "stderr"  # read where it dies

    def ask(self, request: list[str], timeout_s: float) -> str:
        """Its answer, a line; empty where it died or `timeout_s` seconds passed, and then it is gone."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if not answer:
            self.stop()
        return answer

    def said(self) -> str:
        """The last lines of its standard error."""
        return last_lines(self._stderr.read_text())

    def stop(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def close(self) -> None:
        """Ends the process and forgets what it said."""
        self.stop()
        self._folder.cleanup()

    def _start(self) -> subprocess.Popen[str]:
        with self._stderr.open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "scripts.lab.tpu.compile_one", "--serve"],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        return self._process


class Workers:
    """A pool of `num_workers` such processes with one `libtpu`; a context manager, which ends them."""

    def __init__(self, num_workers: int, timeout_s: float, libtpu: Release | None = None) -> None:
        self._timeout_s = timeout_s
        self._workers = [_Worker(libtpu) for _ in range(num_workers)]
        self._free: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.close()

    def compile(self, chip: str, op: str, settings: list[str]) -> Compilation:
        """Compiles in a process that is free, waiting for one; from any thread.

        Raises:
            CompilationError: the compiler refused, died or ran out of time; with the last lines that it said.
        """
        worker = self._free.get()
        try:
            answer = worker.ask([chip, op, *settings], self._timeout_s)
            said = "" if answer else worker.said()
        finally:
            self._free.put(worker)
        if not answer:
            raise CompilationError(f"{chip} {op} {settings}: died, or no end after {self._timeout_s} s\n{said}")
        result: dict[str, Any] = json.loads(answer)
        if "error" in result:
            raise CompilationError(f"{chip} {op} {settings}: {result['error']}")
        return Compilation(result["memory"], [])
