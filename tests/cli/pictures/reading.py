"""What a drawn figure says: words, colours by legend entry, and whether anything covers anything else."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgba_array
from matplotlib.figure import Figure
from matplotlib.legend import Legend


def legends_of(figure: Figure) -> list[Legend]:
    """All legends, of the figure and of its axes."""
    of_axes = [legend for axis in figure.axes if (legend := axis.get_legend()) is not None]
    return [*figure.legends, *of_axes]


def entries_of(figure: Figure) -> list[str]:
    """The words of all legends."""
    return [text.get_text() for legend in legends_of(figure) for text in legend.get_texts()]


def color_of(drawn: Any) -> str:
    """A line's colour, that of an area or of bars, or of their edge where they are not filled."""
    if hasattr(drawn, "get_color"):
        return to_hex(drawn.get_color())
    patch = drawn.patches[0] if hasattr(drawn, "patches") else drawn
    face = to_rgba_array(patch.get_facecolor())[0]
    return to_hex(face if face[3] else patch.get_edgecolor())


def labelled(axis: Axes) -> dict[str, Any]:
    """What was drawn, by the words of the legend."""
    handles, labels = axis.get_legend_handles_labels()
    return dict(zip(labels, handles, strict=True))


def assert_readable(figure: Figure) -> None:
    """It has a title; every panel has a title (a lone one that of the figure) and words at both axes."""
    assert figure.get_suptitle()
    for axis in figure.axes:
        assert axis.get_title() or axis.get_title(loc="left") or len(figure.axes) == 1
        assert axis.get_ylabel()
    assert any(axis.get_xlabel() for axis in figure.axes)
    assert_nothing_is_covered(figure)


def assert_nothing_is_covered(figure: Figure) -> None:
    """Panels with their ticks and titles, legends and the figure's title stand apart, all inside the figure."""
    figure.draw_without_rendering()
    boxes = dict(_boxes(figure))
    for (name, box), (other_name, other) in combinations(boxes.items(), 2):
        width = min(box.x1, other.x1) - max(box.x0, other.x0)
        height = min(box.y1, other.y1) - max(box.y0, other.y0)
        assert min(width, height) <= 1, f"{name} and {other_name} share {width:.0f} x {height:.0f} pixels"
    for name, box in boxes.items():
        over = max(figure.bbox.x0 - box.x0, box.x1 - figure.bbox.x1, figure.bbox.y0 - box.y0, box.y1 - figure.bbox.y1)
        assert over <= 1, f"{name} is cut off by {over:.0f} pixels"


def _boxes(figure: Figure) -> Iterator[tuple[str, Any]]:
    for i, axis in enumerate(figure.axes):
        legend = axis.get_legend()
        if legend is not None:
            yield f"legend of panel {i}", legend.get_window_extent()
            legend.set_in_layout(False)
        yield f"panel {i}", axis.get_tightbbox()
    for i, legend in enumerate(figure.legends):
        yield f"legend {i}", legend.get_window_extent()
    if figure._suptitle is not None:  # type: ignore[attr-defined]  # matplotlib tells its words only
        yield "title", figure._suptitle.get_window_extent()  # type: ignore[attr-defined]
