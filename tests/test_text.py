"""Laws of sizes and tables as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.text import align_table, count_of, did_you_mean, format_bytes, parse_bytes, parse_count


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("56GiB", 56 * 2**30),
        (" 80 GB ", 80 * 10**9),
        ("1.5TiB", 3 * 2**39),
        ("0.1KB", 100),
        ("1_000_000", 10**6),
        ("1,024B", 1024),
        ("7kB", 7000),
        ("80G", 80 * 2**30),
        ("512M", 512 * 2**20),
        (12, 12),
    ],
)
def test_sizes_are_read(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "56X", "56 gigs", "-1GiB", "1e9", "1..2GB"])
def test_ambiguous_or_malformed_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size in bytes such as"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [("32768", 32_768), ("32,768", 32_768), ("1_000", 1000), ("32k", 32_000), ("32K", 32_768), ("1.5M", 3 * 2**19)],
)
def test_counts_are_read(text: str, count: int) -> None:
    assert parse_count(text) == count
    assert parse_count(f"-{text}") == -count


@pytest.mark.parametrize("text", ["", "k", "1.5", "0.0001k", "32 tokens", "1e3", "0x10"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a"):
        parse_count(text)


@given(st.integers(0, 2**50))
def test_formatted_sizes_are_close(num_bytes: int) -> None:
    assert abs(parse_bytes(format_bytes(num_bytes)) - num_bytes) <= 0.005 * 2**40 * (num_bytes >= 2**40) + max(
        0.006 * num_bytes, 0
    )


def test_things_are_counted() -> None:
    assert [count_of(number, "request") for number in (0, 1, 2_000)] == ["0 requests", "1 request", "2,000 requests"]


def test_columns_are_aligned() -> None:
    assert align_table(["name", "n"], [["a", "1,000"], ["bcdefg", "2"]], left={0}) == (
        "name        n\n------  -----\na       1,000\nbcdefg      2"
    )


@pytest.mark.parametrize(
    ("given", "meant"), [("qwen3-8B", "qwen3-8b"), ("LRU", "LRU"), ("llama3", "llama-3"), ("moon", None), ("", None)]
)
def test_what_may_be_meant_is_named_as_it_is_written(given: str, meant: str | None) -> None:
    known = ("llama-3", "qwen3-8b", "LRU")
    assert did_you_mean(given, known) == ("" if meant is None else f"; did you mean {meant}?")
