"""`-` reads standard input and writes standard output, which then holds the file alone; `.gz` is read."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvjax.cli.commands import check
from kvjax.cli.generate.prompts import read_prompts
from kvjax.cli.main import main
from pallas_kernels.merge_states.cases import MergeCase

TRACE = "".join(
    json.dumps({"timestamp": 1_000 * i, "input_length": 1_024, "output_length": 4, "hash_ids": [i // 2, 9 + i]}) + "\n"
    for i in range(6)
)


def run(*argv: object, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "kvjax", *map(str, argv)]
    return subprocess.run(command, input=given, capture_output=True, check=False)


def test_a_trace_comes_from_standard_input_and_the_result_goes_to_standard_output() -> None:
    """Plain or gzipped. What is for a person is on standard error."""
    for data in (TRACE.encode(), gzip.compress(TRACE.encode())):
        done = run("replay", "-", "--num-blocks", 2_000, "--no-progress", "--json", "-", given=data)
        assert done.returncode == 0, done.stderr
        values = json.loads(done.stdout)
        assert (values["requests"], values["trace"]) == (6, "/dev/stdin")
        assert b"6 requests, continuous batching" in done.stderr


def test_a_trace_goes_through_a_pipe(tmp_path: Path) -> None:
    kvjax = f"{sys.executable} -m kvjax"
    command = f"{kvjax} replay --generate chat --num-requests 3 --write - | {kvjax} replay - --num-blocks 2000 --json -"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["requests"] == 3
    assert "prompt tokens, to standard output" in done.stderr


def test_what_a_file_has_already_stays_before_it(tmp_path: Path) -> None:
    """`>>` appends."""
    path = tmp_path / "all.jsonl"
    path.write_text("kept\n")
    command = f"{sys.executable} -m kvjax plan qwen3-8b --memory 8GiB --json - >> {path}"
    subprocess.run(["bash", "-c", command], capture_output=True, check=True)
    first, _, rest = path.read_text().partition("\n")
    assert (first, json.loads(rest)["model"]) == ("kept", "qwen3-8b")


def test_a_plan_is_balanced_for_a_trace_of_standard_input() -> None:
    argv = ("plan", "gemma-3-27b", "--memory", "40GiB", "--no-one-memory", "--trace", "-", "--json", "-")
    done = run(*argv, given=TRACE.encode())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "gemma-3-27b"


def test_recorded_calls_come_from_standard_input(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    argv = ["replay", "--generate", "chat", "--num-requests", "2", "--num-blocks", "2000", "--no-progress"]
    assert main([*argv, "--record", str(path)]) == 0
    done = run("replay", "--calls", "-", given=path.read_bytes())
    assert done.returncode == 0, done.stderr
    assert b"every answer as recorded" in done.stdout


def test_a_table_of_models_goes_to_standard_output_once(capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["replay", "--generate", "chat", "--num-requests", "2", "--no-progress", "--serial", "--memory-sizes"]
    assert main([*argv, "1GiB,2GiB", "--compare-defaults", "qwen3-8b", "--json", "-"]) == 0
    out, err = capfd.readouterr()
    assert len(json.loads(out)["cells"]) == 2
    assert "percent of" in err


def test_rows_of_ops_go_to_standard_output(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "case_types", lambda: {"merge_states": MergeCase})
    assert main(["check", "--json", "-"]) == 0
    out, err = capfd.readouterr()
    assert [row["op"] for row in json.loads(out)["rows"]] == ["merge_states"]
    assert "merge_states" in err


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_prompts_may_be_gzipped(suffix: str, tmp_path: Path) -> None:
    for name, text in (("p.txt", "one\n\ntwo\n"), ("p.jsonl", '"one"\n{"prompt": "two"}\n')):
        path = tmp_path / (name + suffix)
        path.write_bytes(gzip.compress(text.encode()) if suffix else text.encode())
        assert [prompt.text for prompt in read_prompts(None, path)] == ["one", "two"]


@pytest.mark.parametrize(("text", "prompts"), [("one\ntwo\n", ["one", "two"]), ('{"prompt": "a\\nb"}\n', ["a\nb"])])
def test_prompts_come_from_standard_input(text: str, prompts: list[str]) -> None:
    """As JSON lines if the first begins so."""
    code = (
        "from kvjax.cli.generate.prompts import prompts_file, read_prompts; "
        "print([prompt.text for prompt in read_prompts(None, prompts_file('-'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, text=True, check=True)
    assert done.stdout == f"{prompts}\n"


def test_damaged_gzip_data_are_named(tmp_path: Path) -> None:
    path = tmp_path / "p.txt.gz"
    path.write_bytes(gzip.compress(b"one\n" * 99)[:20])
    with pytest.raises(ValueError, match=r"p.txt.gz: expected whole gzip data, got .*; copy the file again"):
        read_prompts(None, path)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["replay", "--generate", "chat", "--write", "-", "--json", "-"],
            "expected - for one of --write and --json, got it for each; standard output holds one file",
        ),
        (["replay", "-", "--calls", "-"], "expected - for one file to read, got it for two"),
    ],
)
def test_a_stream_is_for_one_file(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["replay", "--generate", "chat", "--record", "-"], "--record: expected a file's name, got '-'; name a file"),
        (["replay", "--generate", "chat", "--plot", "-"], "--plot: expected a file's name, got '-'"),
        (["generate", "--plot", "-"], "--plot: expected a file's name, got '-'"),
    ],
)
def test_files_that_are_no_text_have_names(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert message in capsys.readouterr().err


def test_a_reader_that_leaves_ends_quietly() -> None:
    command = f"{sys.executable} -m kvjax replay --generate chat --num-requests 400 --write - | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr
