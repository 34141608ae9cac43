"""CSV tables: times from the first row on, lengths as they stand, prompts that share nothing."""

from __future__ import annotations

import time
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from kvjax.errors import TraceError
from tests.replay.readers.forms import FORMS, request_rows
from tests.replay.readers.laws import read, shared_tokens

TABLES = ("azure_2023", "azure_2024", "burstgpt", "burstgpt_sessions")
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", TABLES)
def test_rows_are_requests(name: str, seed: int, tmp_path: Path) -> None:
    requests, told = read(tmp_path / "t", FORMS[name](np.random.default_rng(seed)))
    rows = request_rows(np.random.default_rng(seed), 512)  # of which the table was made
    assert [(one.input_length, one.output_length) for one in requests] == [
        (row["input_length"], row["output_length"]) for row in rows
    ]
    unit = 1_000 if name == "burstgpt" else 1
    start = rows[0]["timestamp"] // unit * unit
    assert [one.timestamp_ms for one in requests] == [row["timestamp"] // unit * unit - start for row in rows]
    assert "every prompt is distinct" in told
    assert ("1 row without prompt tokens left out" in told) == (name == "burstgpt")
    assert all(shared_tokens(a, b) == 0 for a, b in combinations(requests[:5], 2))


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="the zone of a process cannot be set here")
def test_the_readers_time_zone_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second apart, on the night that clocks go forward; a date without a zone counts as UTC."""
    dates = ("2023-03-26 01:59:59.5", "2023-03-26 02:00:00.5", "2023-03-26T04:00:01.5+02:00")
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        requests, _ = read(tmp_path / "t", HEAD + "".join(f"{date},3,4\n" for date in dates))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert [request.timestamp_ms for request in requests] == [0, 1_000, 2_000]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("5,3", "expected 3 cells as the header has, got 2"),
        ("5,3,4,", "expected 3 cells as the header has, got 4"),
        ("yesterday,3,4", "expected a time in seconds or as a date, got 'yesterday'"),
        ("nan,3,4", "expected TIMESTAMP to be a number from 0 to .*, got nan"),
        ("-5,3,4", "expected TIMESTAMP to be a number from 0 to .*, got -5"),
        ("5,-3,4", "expected ContextTokens to be an integer >= 1, got -3"),
        ("5,3.5,4", "expected ContextTokens to be an integer >= 1, got '3.5'"),
        ("5,3,", "expected GeneratedTokens to be an integer >= 0, got ''"),
        ("5,3,9999999999", "expected GeneratedTokens <= 2147483647, got 9999999999"),
        ("5,3," + "4" * 200_000, r"expected cells separated by commas, got '5,3,4.* \(field larger"),
    ],
)
def test_bad_rows_are_refused_with_their_number(row: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"t.csv:3: " + message):
        read(tmp_path / "t.csv", HEAD + "1,2,3\n" + row + "\n")
