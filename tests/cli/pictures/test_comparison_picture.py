"""`kvjax replay --compare-defaults --plot`: a line per model over memory, or over users at once, below the bound."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from kvjax.cli.pictures.colors import BOUND, COMPARED
from kvjax.cli.replay.cells import Cell
from kvjax.cli.replay.compare_plot import draw_comparison
from tests.cli.pictures.reading import assert_readable, color_of, entries_of, labelled

GB = 10**9


def cell(model: str, gigabytes: float, users: int | None, **hits: int) -> Cell:
    return Cell(
        model, int(gigabytes * GB), users, 1_000, {name.replace("_", " "): value for name, value in hits.items()}
    )


def test_hits_by_memory() -> None:
    cells = [
        cell("b", 1.5, None, serial=70, batches=50, infinite_cache=400),
        cell("a", 20, None, serial=99, batches=300, infinite_cache=390),
        cell("a", 1.5, None, serial=99, batches=100, infinite_cache=390),
        Cell("b", 20 * GB, error="holds no request"),
    ]
    figure = draw_comparison(cells, "trace.jsonl")
    assert_readable(figure)
    (axis,) = figure.axes
    assert figure.get_suptitle() == (
        "How much of the prompts is found in the cache, by memory\ntrace.jsonl, continuous batching"
    )
    assert (axis.get_xlabel(), axis.get_ylabel()) == (
        "memory of one device for the cache, GB",
        "% of the prompt tokens",
    )
    assert [text.get_text() for text in axis.get_xticklabels()] == ["1.5", "20"]
    drawn = {name: list(zip(*line.get_data(), strict=True)) for name, line in labelled(axis).items()}
    assert drawn == {"unlimited cache": [(0, 40), (1, 39)], "b": [(0, 5)], "a": [(0, 10), (1, 30)]}
    assert [color_of(line) for line in axis.lines] == [BOUND, *COMPARED[:2]]
    assert axis.get_ylim() == (0, 105)
    assert entries_of(figure) == ["unlimited cache", "b", "a"]


def test_hits_by_users_at_once() -> None:
    """One at a time where no batch was replayed."""
    cells = [
        cell("a", size, users, serial=1_000 // users, infinite_cache=900) for users in (16, 4, 64) for size in (1, 2)
    ]
    figure = draw_comparison(cells, "agents.jsonl.gz")
    assert_readable(figure)
    (axis,) = figure.axes
    assert figure.get_suptitle() == (
        "How much of the prompts is found in the cache, by users at once\nagents.jsonl.gz, one request at a time"
    )
    assert [text.get_text() for text in axis.get_xticklabels()] == ["4", "16", "64"]
    drawn = {name: line.get_ydata() for name, line in labelled(axis).items()}
    assert list(drawn) == ["unlimited cache", "a, 1 GB", "a, 2 GB"]
    assert list(drawn["a, 2 GB"]) == [25.0, 6.2, 1.5]
    assert list(drawn["unlimited cache"]) == [90, 90, 90]


def test_an_interrupted_comparison_says_so() -> None:
    """It draws what there is, be it nothing."""
    cells = [cell("a", 1, None, serial=500), Cell("a", 2 * GB)]
    figure = draw_comparison(cells, "trace.jsonl")
    assert figure.get_suptitle().endswith("one request at a time, interrupted after 1 of 2 points")
    assert_readable(figure)
    figure = draw_comparison([Cell("a", GB), Cell("a", 2 * GB)], "trace.jsonl")
    assert figure.get_suptitle().endswith("interrupted after 0 of 2 points")
    assert figure.axes[0].lines[:] == []
