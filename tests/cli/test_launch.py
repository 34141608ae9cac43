"""`kvjax launch`: all processes are told who they are, and all start again when one fails."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from kvjax.cli.main import main

TOLD = "import os; print(*(os.environ[f'JAX_{name}'] for name in ('PROCESS_ID', 'NUM_PROCESSES', 'NUM_CPU_DEVICES')))"
FAILS_TWICE = """
import os, sys, time
if os.environ["JAX_PROCESS_ID"] == "1" and int(os.environ["KVJAX_NUM_RESTARTS"]) < 2:
    {end}
"""


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvjax", "launch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_processes_are_told_who_they_are() -> None:
    done = launch("-n", "3", "--cpu-devices", "2", "--", sys.executable, "-c", TOLD)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"[{i}] {i} 3 2" for i in range(3)]
    assert done.stderr == ""


def test_all_start_again_when_one_fails() -> None:
    program = FAILS_TWICE.format(end="sys.exit(7)")
    done = launch("--restarts", "2", "--", sys.executable, "-c", program)
    assert done.returncode == 0
    assert done.stderr.count("kvjax launch: process 1 ended with status 7; ") == 2
    assert done.stderr.count("all start again") == 2


def test_without_restarts_left_the_status_is_that_of_the_first_that_failed() -> None:
    for end, status in (("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 128 + 9)):
        done = launch("--restarts", "0", "--", sys.executable, "-c", FAILS_TWICE.format(end=end))
        assert done.returncode == status
        assert done.stderr.endswith("no restart is left\n")


def test_one_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("kvjax.cli.commands.launch.END_S", 0.25)
    program = "import os, sys, signal\nsys.exit(1) if os.environ['JAX_PROCESS_ID'] == '0' else signal.pause()"
    assert main(["launch", "--restarts", "0", "--", sys.executable, "-c", program]) == 1
    told = re.search(r"process 0 ended with status 1; the others ended within (.*) s", capsys.readouterr().err)
    assert told is not None
    assert 0.2 <= float(told[1]) < 10.0
