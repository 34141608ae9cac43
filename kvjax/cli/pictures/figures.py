"""A figure without a display, its legends beside the data, its axes in plain numbers, and its file.

Flow:    [new_figure] -> axes -> [compared, count_ticks, legend_below, ...] -> [save_figure] -> PNG, PDF, SVG

matplotlib is imported on use. There is no global state: figures of several threads do not meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.cli.pictures.colors import COMPARED, MARKERS
from kvjax.cli.running.output_files import require_matplotlib, writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

DPI = 100
PALETTE_SIZE = 128  # colours of a PNG
SVG_SALT = "kvjax"  # names inside an SVG file, which are random otherwise


def new_figure(width: float, height: float, title: str) -> Figure:
    """An empty figure of so many inches with a title over all its axes.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require_matplotlib("a plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold")
    return figure


def legend_below(axis: Axes, num_columns: int = 3) -> None:
    """A legend below the axis, where it hides no data."""
    look: dict[str, Any] = {"frameon": False, "fontsize": 9, "columnspacing": 1.2, "handlelength": 1.5}
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=num_columns, **look)


def figure_legend(figure: Figure, axis: Axes, num_columns: int = 4) -> None:
    """A legend of an axis below the whole figure; none where nothing was drawn."""
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=num_columns, frameon=False)


def count_ticks(scale: Axis, num_ticks: int = 6) -> None:
    """Whole numbers along an x or y axis, thousands grouped."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    scale.set_major_locator(MaxNLocator(num_ticks, integer=True, steps=[1, 2, 5, 10]))
    scale.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def plain_ticks(scale: Axis, low: float, high: float) -> None:
    """Numbers along a logarithmic axis from low to high as people write them: 1, 2, 5, 10, not powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    scale.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 200 * low else (1.0,)))
    scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    scale.set_minor_formatter(NullFormatter())


def compared() -> Iterator[dict[str, Any]]:
    """Colour and marker of one line after the other of those that are compared; they begin again after the last."""
    for color, marker in cycle(zip(COMPARED, MARKERS, strict=True)):
        yield {"color": color, "marker": marker, "markersize": 6}


def save_figure(figure: Figure, path: Path) -> None:
    """Writes the figure as the end of the file's name says; equal figures give equal files.

    Raises:
        OSError: the file, which is named, cannot be written.
    """
    from matplotlib import rc_context

    with writing(path), rc_context({"svg.hashsalt": SVG_SALT}):
        if path.suffix == ".png":
            _save_png(figure, path)
        else:
            figure.savefig(path, metadata={"Date" if path.suffix == ".svg" else "CreationDate": None})


def _save_png(figure: Figure, path: Path) -> None:
    """A PNG with a palette, a third as large as one in full colour; the plain areas of a plot look the same."""
    from PIL import Image

    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").quantize(PALETTE_SIZE, dither=Image.Dither.NONE).save(path, optimize=True)


__all__ = ["compared", "count_ticks", "figure_legend", "legend_below", "new_figure", "plain_ticks", "save_figure"]
