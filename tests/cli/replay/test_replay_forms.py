"""`kvjax replay` takes every form of traces, say what they took it for, and convert it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from kvjax.cli.main import main
from kvjax.replay import read_trace
from tests.replay.readers.forms import FORMS

CACHE = ("--num-blocks", "2000", "--no-progress")


def write(tmp_path: Path, name: str) -> str:
    path = tmp_path / f"{name}.gz"
    path.write_bytes(gzip.compress(FORMS[name](np.random.default_rng(3)).encode()))
    return str(path)


@pytest.mark.parametrize("options", [("--serial",), (), ("--replicas", "2")])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_runs(
    name: str, options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, name)
    assert main(["replay", path, *options, *CACHE]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(f"{path}: ")
    assert sum(path in line for line in out) == 1
    assert any(f"{len(read_trace(path))} requests" in line for line in out)


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_converted(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, written, results = write(tmp_path, name), str(tmp_path / "w.jsonl"), []
    assert main(["replay", path, "--write", written]) == 0
    for file in (path, written):
        assert main(["replay", file, *CACHE, "--json", str(tmp_path / "out.json")]) == 0
        results.append(json.loads((tmp_path / "out.json").read_text()))
    assert results[0]["read_as"] != results[1]["read_as"]
    for value in ("trace_requests", "prompt_tokens", "hit_tokens", "infinite_hit_tokens", "virtual_seconds"):
        assert results[0][value] == results[1][value]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("mooncake", ("--time-unit", "s", "--hash-block-size", "512"), "12 requests; hash blocks of 512 tokens"),
        ("agents", ("--users", "2", "--hash-block-size", "64"), "; 2 users at once; hash blocks of 64 tokens"),
        (
            "sharegpt",
            ("--users", "2"),
            "2 users at once, 30 s from an answer to the next turn; lengths by a token for 4",
        ),
    ],
)
def test_what_is_given_is_not_assumed(
    name: str, options: tuple[str, ...], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", write(tmp_path, name), "--serial", *options, *CACHE]) == 0
    assert told in capsys.readouterr().out.splitlines()[0]


def test_texts_are_cut_by_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of words: three and one more make a prompt of four tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "t.jsonl").write_text('{"prompt": "a long prompt b", "output_tokens": 1}\n')
    arguments = ("--serial", "--tokenizer", str(tmp_path), *CACHE)
    assert main(["replay", str(tmp_path / "t.jsonl"), *arguments]) == 0
    out = capsys.readouterr().out
    assert "lengths by the tokenizer" in out
    assert "4 prompt tokens" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--tokenizer", "/nowhere"), "expected --tokenizer FOLDER with a tokenizer.json, got none in '/nowhere'"),
        (("--users", "3"), "expected no users for request lines (Mooncake, Qwen-Bailian), got 3; leave it out"),
        (("--hash-block-size", "16"), "hash_ids for "),
    ],
)
def test_options_that_do_not_fit_are_one_clear_line(
    argv: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", write(tmp_path, "mooncake"), *argv, *CACHE]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_options_of_reading_need_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--generate", "chat", "--users", "3", *CACHE]) == 2
    assert "expected --users with a TRACE, got --generate" in capsys.readouterr().err


def test_an_unknown_form_is_one_line_that_says_how_to_convert(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t").write_text("when,what\n1,2\n")
    assert main(["replay", str(tmp_path / "t"), *CACHE]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"kvjax replay: error: {tmp_path / 't'}: expected a trace of a known form, got 'when,what'")
    assert '{"timestamp": milliseconds, "input_length": tokens}' in err
    assert err.count("\n") == 1
