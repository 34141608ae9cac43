"""Laws of the `kvjax` command itself: quick to start, errors on one line, tracebacks on demand."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvjax import __version__
from kvjax.cli.main import COMMANDS, main
from kvjax.cli.options.fields import add_fields, read_fields
from kvjax.cli.options.types import non_negative_float, positive_float, positive_int
from kvjax.cli.running.interrupts import interruptible
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


@pytest.mark.parametrize(
    ("argv", "usage"),
    [
        ([], "usage: kvjax [-h]"),
        (["help"], "usage: kvjax [-h]"),
        (["help", "plan"], "usage: kvjax plan [OPTIONS]"),
        (["plan"], "usage: kvjax plan [OPTIONS]"),
        (["replay"], "usage: kvjax replay [OPTIONS]"),
    ],
)
def test_help_is_shown_where_it_is_asked_for_and_where_nothing_can_be_done(
    argv: list[str], usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(argv)
    assert capsys.readouterr().out.startswith(usage)


@pytest.mark.parametrize(
    ("argv", "meant"), [(["pln"], "plan"), (["plan", "qwen3-8b", "--memry=8GiB"], "--memory"), (["bnech"], "bench")]
)
def test_what_may_be_meant_is_said(argv: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert f"; did you mean {meant}? (see kvjax" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "offered"),
    [("kvjax pl", "plan"), ("kvjax plan qwen3-8b --mem", "--memory"), ("kvjax plan q --platform t", "tpu")],
)
def test_a_shell_is_told_how_a_line_may_go_on(line: str, offered: str, tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    path = tmp_path / "offered"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(path), "_ARGCOMPLETE_IFS": "\n"}
    asked |= {"COMP_LINE": line, "COMP_POINT": str(len(line))}
    subprocess.run([sys.executable, "-m", "kvjax"], check=True, env=os.environ | asked)
    assert offered in path.read_text().split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_its_code(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("argcomplete")
    assert main(["completion", shell]) == 0
    assert "kvjax" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--debug", "plan", "gpt"], ["plan", "gpt", "--debug"]])
def test_debug_shows_the_traceback(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="expected a model's name"):
        main(argv)


def test_module_runs_and_neither_plan_nor_replay_loads_jax() -> None:
    code = (
        "import os, sys, kvjax.cli.commands.plan, kvjax.cli.commands.replay; from kvjax.cli.main import main; "
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


def test_files_are_written_whatever_the_pipe_does(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    command = f"{sys.executable} -m kvjax plan qwen3-8b --memory 8GiB --json {path} | true"
    result = subprocess.run(["bash", "-c", command], check=True, capture_output=True, text=True)
    assert result.stderr == ""
    assert json.loads(path.read_text())["model"] == "qwen3-8b"


@pytest.mark.parametrize(
    ("argv", "name"),
    [(["--json", "/dev/full"], "/dev/full"), ([], "standard output")],
)
def test_a_full_disk_is_named(argv: list[str], name: str) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    command = [sys.executable, "-m", "kvjax", "plan", "qwen3-8b", "--memory", "8GiB", *argv]
    with open(os.devnull if argv else "/dev/full", "w") as output:
        result = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == f"kvjax plan: error: [Errno 28] No space left on device: '{name}'\n"


@pytest.mark.parametrize("option", ["--write", "--json", "--record"])
def test_an_input_is_not_overwritten(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By whatever name."""
    trace, link = tmp_path / "trace.jsonl", tmp_path / "link"
    trace.write_text('{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [0]}\n')
    before = trace.read_bytes()
    link.symlink_to(trace)
    for output in (trace, link):
        assert main(["replay", str(trace), "--num-blocks", "99", option, str(output)]) == 2
        assert f"expected {option} with a file that is not read, got {output}" in capsys.readouterr().err
    assert trace.read_bytes() == before


def test_two_outputs_need_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / "out"), str(tmp_path / "." / "out")]
    argv = ["replay", "--generate", "chat", "--num-blocks", "99", "--json", paths[0], "--record", paths[1]]
    assert main(argv) == 2
    assert "expected a file of its own for --json and --record" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_the_terminal_cannot_show_is_replaced() -> None:
    code = (
        "import sys; from unittest import mock; from kvjax.cli.main import main; "
        "run = lambda args: print('\u2588 held'); "
        "sys.exit(mock.patch('kvjax.cli.commands.plan.run', run)(main)(['plan', 'qwen3-8b']))"
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
    ("argv", "program", "message"),
    [
        (["paint"], "kvjax", "argument COMMAND: expected one of plan, replay, "),
        (["pln"], "kvjax", "argument COMMAND: expected one of plan, replay, "),
        (["plan", "qwen3-8b", "--memry", "8GiB"], "kvjax plan", "unrecognized arguments: --memry 8GiB; did you mean "),
        (["plan", "qwen3-8b", "--mem", "8GiB"], "kvjax plan", "unrecognized arguments: --mem 8GiB"),
        (["plan", "--memory"], "kvjax plan", "argument --memory: expected one argument"),
        (["plan", "--json", "/nowhere/x"], "kvjax plan", "argument --json: expected a file in a folder that exists, "),
        (["replay", "--policy", "best"], "kvjax replay", "argument --policy: expected one of probation, "),
        (["replay", "--seed", "x\ny"], "kvjax replay", "argument --seed: expected an integer, got 'x"),
        (
            ["generate", "--num-blocks", "9", "--memory", "1MiB"],
            "kvjax generate",
            "argument --memory: not allowed",
        ),
        (["generate", "--no-such"], "kvjax generate", "unrecognized arguments: --no-such"),
    ],
)
def test_a_command_line_that_cannot_be_is_one_line_and_status_2(
    argv: list[str], program: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    captured = capsys.readouterr()
    assert (ended.value.code, captured.out) == (2, "")
    assert captured.err.startswith(f"{program}: error: {message}")
    assert captured.err.endswith(f" (see {program} --help)\n")
    assert captured.err.count("\n") == 1


def test_a_second_interrupt_does_not_wait() -> None:
    with interruptible() as should_stop:
        signal.raise_signal(signal.SIGINT)
        assert should_stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupts_that_somebody_else_takes_stay_theirs() -> None:
    """A handler of the program that kvjax runs in; and threads, which never get a signal."""
    taken: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: taken.append(number))
    try:
        with interruptible() as should_stop:
            signal.raise_signal(signal.SIGINT)
            assert not should_stop()
    finally:
        signal.signal(signal.SIGINT, before)
    assert taken == [signal.SIGINT]

    def ask() -> bool:
        with interruptible() as should_stop:
            return should_stop()

    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(ask).result()


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

    monkeypatch.setattr("kvjax.cli.commands.plan.run", fail)
    assert main(["plan", "qwen3-8b"]) == status
    assert capsys.readouterr().err == message


def test_an_option_stands_for_each_field_of_a_dataclass() -> None:
    @dataclass(frozen=True)
    class Sizes:
        max_num_seqs: int = 2_000
        host_latency_s: float = 2e-5
        write_through: bool = False
        hybrid: bool = True

    parser = argparse.ArgumentParser()
    add_fields(parser, Sizes, host_latency_s=1e-6)
    text = " ".join(parser.format_help().split())
    assert "--max-num-seqs N Run at most N requests at once. [default: 2,000]" in text
    assert "--host-latency-us X Add X microseconds to each such copy. [default: 1]" in text
    assert read_fields(parser.parse_args([]), Sizes) == {"host_latency_s": 1e-6}
    given = parser.parse_args(["--max-num-seqs", "3", "--host-latency-us", "7", "--write-through", "--no-hybrid"])
    expected = {"max_num_seqs": 3, "host_latency_s": 7e-6, "write_through": True, "hybrid": False}
    assert read_fields(given, Sizes) == expected
    assert read_fields(given, Sizes, "hybrid") == {"hybrid": False}
