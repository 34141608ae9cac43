"""The script behind docs/eviction.md on a small trace: both tables, the plot, and no case run twice."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from kvjax.cli.pictures.colors import BOUND
from kvjax.replay import REPLAY_POLICIES, write_trace
from tests.cli.pictures.reading import assert_readable, color_of, labelled
from tests.replay.random_traces import random_trace

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import compare_evictions


def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[list[list[str]], str]:
    arguments = [str(folder / "trace.jsonl"), "--json", str(folder / "found.json"), "--plot", str(folder / "plot.png")]
    options = ["--sizes", "20,12,200,4000,150", "--models", "gpt-oss-120b", "--retention-blocks", "500"]
    assert compare_evictions.main([*arguments, *options]) == 0
    captured = capsys.readouterr()
    lines = [line for line in captured.out.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines], captured.err


def test_tables_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(random_trace(3, 120), tmp_path / "trace.jsonl")
    rows, log = run(tmp_path, capsys)
    assert rows[0] == ["blocks", *REPLAY_POLICIES]
    assert [row[0] for row in rows[2:7]] == ["12", "20", "150", "200", "4,000"]
    rates = [[float(cell.split(" %")[0]) for cell in row[1:]] for row in rows[2:7]]
    for of_size in rates:
        assert of_size[-1] == max(of_size)
    assert rates == sorted(rates)
    assert len(set(rates[-1])) == 1  # nothing is evicted
    assert rates[2][0] < rates[2][-1] == rates[3][-1] == rates[-1][-1]  # where the bound is not replayed again
    assert rows[7] == ["model", "kept", "blocks cached", "lru", "slru"]
    assert [row[:2] for row in rows[9:]] == [
        ["gpt-oss-120b", kept] for kept in ("everything", "every 8,192", "ends and partings")
    ]
    cached = [int(row[2].replace(",", "")) for row in rows[9:]]
    assert cached[0] > cached[1] >= cached[2]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert 5 * len(REPLAY_POLICIES) + 9 > log.count("running") == len(json.loads((tmp_path / "found.json").read_text()))
    again, log = run(tmp_path, capsys)
    assert again == rows
    assert "running" not in log


def test_the_plot_has_a_line_per_policy_below_who_knows_the_trace(tmp_path: Path) -> None:
    rates = {policy: [1.0 + i, 9.0] for i, policy in enumerate(REPLAY_POLICIES)} | {"infinite": [20.0, 20.0]}
    results = compare_evictions.Results(tmp_path / "none.json", [], "x/trace.jsonl: lines", 16)
    figure = compare_evictions.draw(results, [10, 300], rates)
    assert_readable(figure)
    (axis,) = figure.axes
    assert figure.get_suptitle().endswith("\ntrace.jsonl, one request at a time")
    drawn = labelled(axis)
    named = {"unlimited cache": "infinite", "belady: knows the trace": "belady"}
    assert {named.get(name, name): list(line.get_ydata()) for name, line in drawn.items()} == rates
    assert {name for name, line in drawn.items() if color_of(line) == BOUND} == set(named)
    rates["lru"] = rates["probation"]
    assert "probation, lru" in labelled(compare_evictions.draw(results, [10, 300], rates).axes[0])
    assert [text.get_text() for text in axis.get_xticklabels()] == ["10", "300"]


def test_results_of_another_trace_are_not_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of as many requests, under the same file of results."""
    found = []
    for seed in range(2):
        write_trace(random_trace(seed, 20), tmp_path / f"{seed}.jsonl")
        arguments = [str(tmp_path / f"{seed}.jsonl"), "--json", str(tmp_path / "found.json"), "--sizes", "12"]
        assert compare_evictions.main([*arguments, "--models", "llama-3-8b", "--block-size", "64"]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] != found[1]


def test_gains_are_told_in_order_and_in_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sizes, two policies, each way; of a pool that holds everything nothing is gained."""
    monkeypatch.setattr(compare_evictions, "SHARES", (0.5, 4.0))
    write_trace(random_trace(3, 60), tmp_path / "trace.jsonl")
    arguments = [str(tmp_path / "trace.jsonl"), "--json", str(tmp_path / "found.json"), "--gains"]
    assert compare_evictions.main(arguments) == 0
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["full attention", "50 %", "400 %"]
    assert [row[0] for row in rows[2:]] == ["serial", "in batches"]
    assert all(row[2].endswith("+0.0") for row in rows[2:])
    assert len(json.loads((tmp_path / "found.json").read_text())) == 8
