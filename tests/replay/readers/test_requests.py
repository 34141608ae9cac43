"""Requests one a row: what prompts share is what the ids say, whatever ids, sizes and times a file has."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from kvjax.errors import TraceError
from kvjax.replay import TraceRequest, read_trace, write_trace
from tests.replay.readers.forms import FORMS, lines_of, request_rows
from tests.replay.readers.laws import check_trace, num_shared, read, shared_tokens

SIZES = (16, 64, 512)
GOOD = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [0, 7]}


def ids_of_prefixes(rows: list[dict]) -> list[list[int]]:
    return [row["hash_ids"] for row in rows]


def ids_of_contents(rows: list[dict]) -> list[list[int]]:
    """By block alone: one id follows several."""
    return [[hash_id % 5 for hash_id in row["hash_ids"]] for row in rows]


def ids_of_64_bits(rows: list[dict]) -> list[list[int]]:
    return [[hash_id * 2**40 + 2**63 for hash_id in row["hash_ids"]] for row in rows]


@pytest.mark.parametrize("whole_only", [False, True], ids=["last id counted", "whole blocks only"])
@pytest.mark.parametrize("ids_of", [ids_of_prefixes, ids_of_contents, ids_of_64_bits])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_prompts_share_the_tokens_of_equal_leading_ids(size, ids_of, whole_only, seed, tmp_path: Path) -> None:
    """And no others: a tail that has no id is no other prompt's."""
    rows = request_rows(np.random.default_rng(seed), size)
    rows[0] |= {"input_length": size * 3 + 1, "hash_ids": [1_000, 1_001, 1_002, 1_003]}  # no other size fits
    for row, ids in zip(rows, ids_of(rows), strict=True):
        row["hash_ids"] = ids[: row["input_length"] // size] if whole_only else ids
    requests, told = read(tmp_path / "t", lines_of(rows))
    assert f"hash blocks of {size} tokens" in told
    assert ("numbered anew" in told) == (ids_of is not ids_of_prefixes)
    check_trace(requests)
    for (a, row_a), (b, row_b) in combinations(zip(requests, rows, strict=True), 2):
        shared = size * num_shared(row_a["hash_ids"], row_b["hash_ids"])
        assert shared_tokens(a, b) == min(shared, a.input_length, b.input_length)
        assert (len(a.token_ids()), a.hash_block_size) == (row_a["input_length"], size)


@pytest.mark.parametrize("size", [1, 3, 24, 1_000])
def test_a_size_may_be_given(size: int, tmp_path: Path) -> None:
    rows = request_rows(np.random.default_rng(1), size)
    requests, told = read(tmp_path / "t", lines_of(rows), hash_block_size=size)
    assert told.endswith(f"hash blocks of {size} tokens")
    assert [len(request.token_ids()) for request in requests] == [row["input_length"] for row in rows]


@pytest.mark.parametrize("seed", range(20))
def test_times_are_milliseconds_or_with_fractions_seconds(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    rows = [{"timestamp": int(time), "input_length": 5} for time in np.sort(rng.integers(1, 9_999, 8))]
    expected = [row["timestamp"] for row in rows]

    def times(scale: float, **reading) -> tuple[list[int], str]:
        text = lines_of([row | {"timestamp": row["timestamp"] * scale} for row in rows])
        requests, told = read(tmp_path / "t", text, **reading)
        return [request.timestamp_ms for request in requests], told

    assert times(1)[0] == times(1.0)[0] == expected
    assert "times in ms unless --time-unit says otherwise" in times(1)[1]
    assert "times in s unless --time-unit says otherwise" in times(0.00123)[1]
    assert times(0.001)[0] == times(0.001, time_unit="s")[0] == expected
    assert times(1, time_unit="s")[0] == [1_000 * time for time in expected]
    assert times(1.00001, time_unit="ms")[0] == expected


@pytest.mark.parametrize("scale", [1, 0.001], ids=["ms", "s"])
def test_dates_count_from_the_first(scale: float, tmp_path: Path) -> None:
    rows = [{"timestamp": (1_700_000_000_001 + 250 * i) * scale, "input_length": 5} for i in range(3)]
    assert [one.timestamp_ms for one in read(tmp_path / "t", lines_of(rows))[0]] == [0, 250, 500]


@pytest.mark.parametrize("seed", range(20))
def test_rows_out_of_order_are_sorted_and_those_of_one_time_stay(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    rows = [{"timestamp": int(rng.integers(5)), "input_length": 1 + i} for i in range(12)]
    requests, told = read(tmp_path / "t", lines_of(rows))
    assert "rows sorted by time" in told
    found = [(request.timestamp_ms, request.input_length) for request in requests]
    assert found == sorted((row["timestamp"], row["input_length"]) for row in rows)


def test_what_a_file_lacks_is_assumed_and_told(tmp_path: Path) -> None:
    requests, told = read(tmp_path / "t", FORMS["lengths_alone"](np.random.default_rng(0)))
    assert {request.output_length for request in requests} == {256}
    assert "no output_length: 256 tokens each assumed; " in told
    assert told.endswith("no hash ids: every prompt is distinct, so none hits another's cache")
    assert all(shared_tokens(a, b) == 0 for a, b in combinations(requests, 2))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", FORMS)
def test_what_is_written_is_read_back(name: str, seed: int, tmp_path: Path) -> None:
    """A trace of any form becomes lines that others can read; a time of the first on, which reading may have moved."""
    requests, _ = read(tmp_path / "t", FORMS[name](np.random.default_rng(seed)))
    write_trace(requests, tmp_path / "written")
    assert read_trace(tmp_path / "written") == requests
    for line, request in zip((tmp_path / "written").read_text().splitlines(), requests, strict=True):
        assert json.loads(line)["hash_ids"] == list(request.hash_ids)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", r"expected a JSON object, got '{oops' \(.*\)"),
        ("[1]", "expected a JSON object, got list"),
        ("[" * 100_000, r"expected a JSON object, got '\[\[\[.* \(.*\)"),
        ({"timestamp": 5, "hash_ids": []}, r"expected the key 'input_length', got \['timestamp', 'hash_ids'\]"),
        (GOOD | {"timestamp": "6"}, "expected timestamp to be a number from 0 to 9.0072e.12, got '6'"),
        (GOOD | {"timestamp": True}, "expected timestamp to be a number from 0 to .*, got True"),
        (GOOD | {"timestamp": -1}, "expected timestamp to be a number from 0 to .*, got -1"),
        (GOOD | {"timestamp": float("nan")}, "expected timestamp to be a number from 0 to .*, got nan"),
        (GOOD | {"timestamp": 10**300}, "expected timestamp to be a number from 0 to .*, got 1000"),
        (GOOD | {"input_length": 0}, "expected input_length to be an integer >= 1, got 0"),
        (GOOD | {"input_length": 600.0}, "expected input_length to be an integer >= 1, got 600.0"),
        (GOOD | {"output_length": -1}, "expected output_length to be an integer >= 0, got -1"),
        (GOOD | {"output_length": 2**31}, "expected output_length <= 2147483647, got 2147483648"),
        (
            GOOD | {"hash_ids": [0]},
            r"expected 2 hash_ids for 600 tokens \(one per 512\), got 1; give --hash",
        ),
        (GOOD | {"hash_ids": [0, 7, 8]}, "expected 2 hash_ids for 600 tokens .*, got 3"),
        (GOOD | {"hash_ids": "07"}, "expected hash_ids to be a list of integers >= 0, got '07'"),
        (GOOD | {"hash_ids": [0, 1.5]}, r"expected hash_ids to be a list of integers >= 0, got \[0, 1.5\]"),
        (GOOD | {"hash_ids": [0, -1]}, r"expected hash_ids to be a list of integers >= 0, got \[0, -1\]"),
        (GOOD | {"hash_ids": [2**70, -1]}, r"expected hash_ids to be a list of integers >= 0, got \[1180"),
        (GOOD | {"after": 0}, "expected after in all rows or none, got it here and not at .*t.jsonl:1"),
        ({"timestamp": 6, "input_length": 9, "output_length": 1}, "expected the key 'hash_ids', got"),
    ],
)
def test_bad_lines_are_refused_with_their_number(tmp_path: Path, line: dict | str, message: str) -> None:
    lines = [json.dumps(GOOD), "", line if isinstance(line, str) else json.dumps(line)]
    with pytest.raises(TraceError, match=r"t.jsonl:3: " + message):
        read(tmp_path / "t.jsonl", "\n".join(lines))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [GOOD | {"timestamp": 5}, GOOD | {"timestamp": 7.5}],
            "t:1: expected timestamp as integers .* give --time",
        ),
        ([GOOD | {"hash_block_size": 512}, GOOD | {"hash_block_size": 64}], "t:1: expected one hash_block_size"),
        ([GOOD | {"after": 0}], "t:1: expected after as the place of an earlier row, from 0, .* got 0"),
        ([GOOD | {"after": -1}, GOOD | {"after": 0, "timestamp": 1}], "t:2: expected after .* got 0; sort the rows"),
    ],
)
def test_rows_that_contradict_each_other_are_refused(rows: list[dict], message: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=message):
        read(tmp_path / "t", lines_of(rows))


def test_a_block_size_for_no_ids_is_refused(tmp_path: Path) -> None:
    text = FORMS["lengths_alone"](np.random.default_rng(0))
    with pytest.raises(TraceError, match="t:1: expected hash_ids with a hash block size of 16, got none"):
        read(tmp_path / "t", text, hash_block_size=16)


def test_more_different_tokens_than_there_are_ids_for_are_refused(tmp_path: Path) -> None:
    rows = [{"timestamp": i, "input_length": 2**30} for i in range(3)]
    with pytest.raises(TraceError, match=r"expected at most 4,194,304 different blocks of 512 tokens, got more; read"):
        read(tmp_path / "t", lines_of(rows))


def test_zero_is_a_time_of_every_unit(tmp_path: Path) -> None:
    rows = [{"timestamp": time, "input_length": 5} for time in (0, 0.5)]
    assert read(tmp_path / "t", lines_of(rows))[0] == [
        TraceRequest(0, 5, 256, (0,)),
        TraceRequest(500, 5, 256, (1,)),
    ]
