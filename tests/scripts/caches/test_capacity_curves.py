"""Capacity curves: a table row for each size, a plot, and results that are kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import capacity_curves

from kvjax.cli.pictures.colors import BOUND, COMPARED
from kvjax.replay import write_trace
from tests.cli.pictures.reading import assert_readable, color_of, entries_of
from tests.replay.replicas.test_fleet import conversations


def test_tables_and_plot_are_written_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_the_plot_has_a_panel_per_measure_and_a_line_per_disk(tmp_path: Path) -> None:
    results = capacity_curves.Results(tmp_path / "none.json", [], "trace", 52 << 30)
    times = {name: {"mean": 0.5, "p90": 1.5} for name in (capacity_curves.FIRST,)}
    results.of = lambda replicas, host, disk: {  # type: ignore[method-assign]
        "token_hit_rate": (host + disk) / 100,
        "infinite_token_hit_rate": 0.3,
        **times,
    }
    figure = capacity_curves.draw(results, 4, [0, 8], [0, 16])
    assert_readable(figure)
    assert figure.get_suptitle().startswith("What host memory and a shared disk give 4 replicas of llama-3-8b\n")
    hits, mean, most = figure.axes
    assert [list(line.get_ydata()) for line in hits.lines] == [[30, 30], [0, 8], [16, 24]]
    assert entries_of(figure) == ["one unlimited cache for all", "shared disk: none", "shared disk: 16 GiB"]
    assert color_of(hits.lines[0]) == BOUND
    assert [color_of(line) for line in hits.lines[1:]] == [color_of(line) for line in mean.lines] == list(COMPARED[:2])
    assert [set(line.get_ydata()) for line in (*mean.lines, *most.lines)] == [{0.5}, {0.5}, {1.5}, {1.5}]
    assert [axis.get_ylim()[0] for axis in figure.axes] == [0, 0, 0]
