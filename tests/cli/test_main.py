"""Laws of the `kvjax` command itself: quick to start, errors on one line, tracebacks on demand."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import pytest

from kvjax import __version__
from kvjax.cli.arguments import non_negative_float, positive_float, positive_int
from kvjax.cli.main import COMMANDS, main
from kvjax.errors import ConfigError


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"kvjax {__version__}\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(f"    {command} " in out for command in COMMANDS)


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "the following arguments are required: COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--debug", "plan", "gpt"], ["plan", "gpt", "--debug"]])
def test_debug_shows_the_traceback(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="expected a model's name"):
        main(argv)


def test_module_runs_and_neither_plan_nor_replay_loads_jax() -> None:
    code = (
        "import os, sys, kvjax.cli.plan, kvjax.cli.replay; from kvjax.cli.main import main; "
        "main(['plan', 'qwen3-8b', '--memory', '8GiB', '--json', os.devnull]); "
        "sys.exit(sum(name in sys.modules for name in ('jax', 'flax', 'matplotlib', 'tqdm')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    out = subprocess.run([sys.executable, "-m", "kvjax", "--version"], check=True, capture_output=True, text=True)
    assert out.stdout.startswith("kvjax ")


def test_a_closed_pipe_ends_quietly() -> None:
    command = f"{sys.executable} -m kvjax plan qwen3-8b --memory 8GiB | head -n 1"
    result = subprocess.run(["bash", "-c", command], check=True, capture_output=True, text=True)
    assert result.stderr == ""


def test_what_the_terminal_cannot_show_is_replaced() -> None:
    code = (
        "import sys; from unittest import mock; from kvjax.cli.main import main; "
        "run = lambda args: print('\u2588 held'); sys.exit(mock.patch('kvjax.cli.plan.run', run)(main)(['plan']))"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=environment)
    assert result.stdout.split() == [b"?", b"held"]


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (positive_int, "1.5", "expected an integer >= 1, got '1.5'"),
        (positive_float, "0", "expected a number > 0, got '0'"),
        (positive_float, "nan", "expected a number > 0, got 'nan'"),
        (non_negative_float, "-1", "expected a number >= 0, got '-1'"),
    ],
)
def test_argument_types_refuse(parse, text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        parse(text)


def test_argument_types_accept() -> None:
    assert (positive_int("1,000"), positive_float("0.5"), non_negative_float("0")) == (1000, 0.5, 0.0)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "kvjax: interrupted\n"),
        (NotImplementedError("not on this backend"), 2, "kvjax plan: error: not on this backend\n"),
        (ValueError("two\nlines"), 2, "kvjax plan: error: two lines\n"),
        (OSError(), 2, "kvjax plan: error: OSError\n"),
        (MemoryError(), 2, "kvjax plan: error: MemoryError\n"),
        (RuntimeError("no device"), 2, "kvjax plan: error: no device\n"),
    ],
)
def test_errors_have_a_status_and_one_line(
    error: BaseException,
    status: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr("kvjax.cli.plan.run", fail)
    assert main(["plan", "qwen3-8b"]) == status
    assert capsys.readouterr().err == message
