"""Figures become files of the form that their names say, equal ones equal files; axes have plain numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from kvjax.cli.pictures.colors import COMPARED, HELD
from kvjax.cli.pictures.figures import compared, count_ticks, figure_legend, new_figure, plain_ticks, save_figure


def drawn() -> Figure:
    figure = new_figure(4, 3, "A title")
    figure.subplots().plot([1, 2], [3, 4], color=HELD)
    return figure


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_a_file_is_what_its_name_says(suffix: str, start: bytes, tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.{suffix}" for i in range(2)]
    for path in paths:
        save_figure(drawn(), path)
    one, other = (path.read_bytes() for path in paths)
    assert one.startswith(start)
    assert one == other


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"none.x\.png"):
        save_figure(drawn(), tmp_path / "none" / "x.png")


def test_plain_areas_keep_their_colours(tmp_path: Path) -> None:
    """A PNG has a palette, chosen from what is drawn."""
    from matplotlib.image import imread

    figure = new_figure(4, 3, "")
    figure.subplots().fill_between([0, 1], 0, 1, color=HELD)
    save_figure(figure, tmp_path / "x.png")
    image = imread(tmp_path / "x.png")
    middle = image[image.shape[0] // 2, image.shape[1] // 2, :3]
    assert [round(255 * float(part)) for part in middle] == [int(HELD[i : i + 2], 16) for i in (1, 3, 5)]


def test_numbers_are_written_as_people_do() -> None:
    figure = drawn()
    (axis,) = figure.axes
    axis.set(xscale="log", xlim=(0.5, 3_000), ylim=(0, 5_000))
    plain_ticks(axis.xaxis, 0.5, 3_000)
    count_ticks(axis.yaxis)
    figure.draw_without_rendering()
    shown = [
        text.get_text()
        for text, at in zip(axis.get_xticklabels(), axis.get_xticks(), strict=True)
        if 0.5 <= at <= 3_000
    ]
    assert shown == ["1", "10", "100", "1,000"]
    assert "4,000" in [text.get_text() for text in axis.get_yticklabels()]


def test_what_is_compared_begins_again_after_the_last_colour() -> None:
    styles = compared()
    found = [next(styles)["color"] for _ in range(len(COMPARED) + 1)]
    assert found == [*COMPARED, COMPARED[0]]


def test_a_figure_without_names_has_no_legend() -> None:
    figure = drawn()
    figure_legend(figure, figure.axes[0])
    assert not figure.legends
