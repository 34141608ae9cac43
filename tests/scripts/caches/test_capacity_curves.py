"""Capacity curves: a table row for each size, a plot, and results that are kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import capacity_curves

from kvjax.replay import write_trace
from tests.replay.replicas.test_fleet import conversations


def test_tables_and_plot_are_written_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    write_trace(conversations(3, 2), tmp_path / "trace.jsonl")
    sizes = (
        "--replicas",
        "2",
        "--memory",
        "1GiB",
        "--hosts",
        "0",
        "2",
        "--disks",
        "0",
        "2",
        "--links",
        "50",
        "--numbers",
        "1",
    )
    paths = ("--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "plot.svg"))
    argv = [str(tmp_path / "trace.jsonl"), *sizes, *paths]
    assert capacity_curves.main(argv) == 0
    out = capsys.readouterr().out
    assert "| host of each | disk: none | disk: 2 GiB |" in out
    assert "| 1 + 1 | 50 GB/s |" in out
    assert "| 2 mixed | - |" in out
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")
    known = json.loads((tmp_path / "out.json").read_text())
    rates = {key: one["token_hit_rate"] for key, one in known.items() if "host=2 " in key}
    assert max(rates.values()) == pytest.approx(1 / 3)  # of the second turn, which is twice as long, the first
    assert capacity_curves.main(argv) == 0
    captured = capsys.readouterr()
    assert captured.out == out
    assert "running" not in captured.err
