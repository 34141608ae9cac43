"""What models hit as a picture: over memory, or over users at once, with what no cache exceeds.

Flow:    Cells -> [draw_comparison] -> matplotlib's Figure -> save_figure -> PNG, PDF or SVG
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvjax.cli.pictures.colors import BOUND
from kvjax.cli.pictures.figures import compared, figure_legend, new_figure
from kvjax.cli.replay.cells import Cell
from kvjax.replay.compare import BATCHES, INFINITE, SERIAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIGABYTE = 1e9
MODES = {BATCHES: "continuous batching", SERIAL: "one request at a time"}


def draw_comparison(cells: Sequence[Cell], workload: str) -> Figure:
    """Hit rate by memory, a line per model; where users vary by users at once, a line per model and memory size.

    The rate is that of batches where they were replayed, else of one request at a time. Cells without one are left out.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    mode = BATCHES if any(BATCHES in cell.hit_tokens for cell in cells) else SERIAL
    over_users = any(cell.users is not None for cell in cells)
    by = "users at once" if over_users else "memory"
    num_done = sum(cell.error is not None or mode in cell.hit_tokens for cell in cells)
    part = "" if num_done == len(cells) else f", interrupted after {num_done} of {len(cells)} points"
    about = f"{workload}, {MODES[mode]}{part}"
    figure = new_figure(8.5, 5.2, f"How much of the prompts is found in the cache, by {by}\n{about}")
    axis = figure.subplots()
    if over_users:
        _draw_lines(axis, cells, mode, lambda cell: cell.users or 0, _model_and_memory)
        axis.set_xlabel("users at once, each in one session")
    else:
        _draw_lines(axis, cells, mode, lambda cell: cell.memory_bytes / GIGABYTE, lambda cell: cell.model)
        axis.set_xlabel("memory of one device for the cache, GB")
    axis.set_ylabel("% of the prompt tokens")
    axis.set_ylim(0, 105)
    axis.grid(alpha=0.3)
    figure_legend(figure, axis, num_columns=3)
    return figure


def _draw_lines(
    axis: Axes, cells: Sequence[Cell], mode: str, place: Callable[[Cell], float], name: Callable[[Cell], str]
) -> None:
    """A line per name over evenly spaced places, and the bound above them."""
    places = sorted({place(cell) for cell in cells})
    at = {value: i for i, value in enumerate(places)}
    bounds = [(at[place(cell)], percent) for cell in cells if (percent := cell.percent(INFINITE)) is not None]
    if bounds:
        highest = {x: max(y for other, y in bounds if other == x) for x, _ in bounds}
        x, y = zip(*sorted(highest.items()), strict=True)
        axis.plot(x, y, ":", color=BOUND, linewidth=2, zorder=3, label="unlimited cache")
    for label, style in zip(dict.fromkeys(map(name, cells)), compared(), strict=False):
        points = sorted(
            (at[place(cell)], percent)
            for cell in cells
            if name(cell) == label and (percent := cell.percent(mode)) is not None
        )
        if points:
            axis.plot(*zip(*points, strict=True), label=label, **style)
    axis.set_xticks(range(len(places)), [f"{value:,.6g}" for value in places])
    axis.margins(x=0.05)


def _model_and_memory(cell: Cell) -> str:
    return f"{cell.model}, {cell.memory_bytes / GIGABYTE:,.6g} GB"


__all__ = ["draw_comparison"]
