"""Laws of the trace format: what is written is read back, and every bad line is refused by its number."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from kvjax.errors import TraceError
from kvjax.replay import TraceRequest, read_trace, write_trace

GOOD = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [0, 7]}


def write_lines(path: Path, *lines: dict | str) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_round_trip(tmp_path: Path) -> None:
    requests = [TraceRequest(0, 1, 0, (3,)), TraceRequest(0, 512, 9, (4,)), TraceRequest(70, 513, 1, (4, 4_194_303))]
    write_trace(requests, tmp_path / "t.jsonl")
    assert read_trace(tmp_path / "t.jsonl") == requests
    assert read_trace(tmp_path / "t.jsonl", limit=2) == requests[:2]


def test_other_keys_and_blank_lines_are_ignored(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", "", GOOD | {"session": "a"}, "  ")
    assert read_trace(path) == [TraceRequest(5, 600, 3, (0, 7))]


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(GOOD), encoding="utf-8-sig")
    assert read_trace(path) == [TraceRequest(5, 600, 3, (0, 7))]


def test_tokens_follow_from_hash_ids() -> None:
    tokens = TraceRequest(0, 600, 1, (2, 7)).token_ids()
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [*range(1024, 1536), *range(3584, 3584 + 88)]
    assert TraceRequest(0, 512, 1, (4_194_303,)).token_ids()[-1] == 2**31 - 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", r"expected a JSON object, got '{oops' \(.*\)"),
        ("[1]", "expected a JSON object, got list"),
        ({"timestamp": 5, "hash_ids": []}, "expected the keys .*, got no input_length, output_length"),
        (GOOD | {"timestamp": 4}, r"expected timestamp >= 5 \(the request before\), got 4; sort the trace by time"),
        (GOOD | {"timestamp": "6"}, "expected timestamp to be an integer >= 0, got '6'"),
        (GOOD | {"timestamp": True}, "expected timestamp to be an integer >= 0, got True"),
        (GOOD | {"input_length": 0}, "expected input_length to be an integer >= 1, got 0"),
        (GOOD | {"input_length": 600.0}, "expected input_length to be an integer >= 1, got 600.0"),
        (GOOD | {"output_length": -1}, "expected output_length to be an integer >= 0, got -1"),
        (GOOD | {"timestamp": 10**300}, "expected timestamp <= 9007199254740992, got 1000"),
        (GOOD | {"output_length": 2**31}, "expected output_length <= 2147483647, got 2147483648"),
        ("[" * 100_000, r"expected a JSON object, got '\[\[\[.* \(.*\)"),
        (GOOD | {"hash_ids": [0]}, r"expected 2 hash_ids for 600 tokens \(one per 512\), got 1"),
        (GOOD | {"hash_ids": [0, 7, 8]}, "expected 2 hash_ids for 600 tokens .*, got 3"),
        (GOOD | {"hash_ids": "07"}, "expected hash_ids to be a list, got '07'"),
        (GOOD | {"hash_ids": [0, 1.5]}, r"expected hash_ids in \[0, 4194303\], got 1.5"),
        (GOOD | {"hash_ids": [0, -1]}, r"expected hash_ids in \[0, 4194303\], got -1"),
        (GOOD | {"hash_ids": [0, 4_194_304]}, r"expected hash_ids in \[0, 4194303\], got 4194304"),
    ],
)
def test_bad_lines_are_refused_with_their_number(tmp_path: Path, line: dict | str, message: str) -> None:
    path = write_lines(tmp_path / "t.jsonl", GOOD, "", line)
    with pytest.raises(TraceError, match=re.escape(str(path)) + ":3: " + message):
        read_trace(path)


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\x00\n")
    with pytest.raises(TraceError, match=r"t.jsonl:2: expected a JSON object"):
        read_trace(path)


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"t.jsonl: expected at least one request, got none"):
        read_trace(write_lines(tmp_path / "t.jsonl", ""))


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none.jsonl")
