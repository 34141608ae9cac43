"""The roofline plot: what was reached next to what the device allows.

Flow:    rows with times, Peaks -> [draw] -> matplotlib's Figure -> save_figure -> PNG, PDF or SVG
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvjax.cli.pictures.colors import BOUND
from kvjax.cli.pictures.figures import compared, figure_legend, new_figure, plain_ticks
from scripts.lab.bench.report import Peaks, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def points(rows: Iterable[Row]) -> dict[str, list[tuple[float, float]]]:
    """By implementation: (operations per byte, operations per second), of what has operations and a time."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.median_us and row.flops:
            point = (row.flops / row.num_bytes, row.flops / (row.median_us * 1e-6))
            found.setdefault(row.by, []).append(point)
    return found


def roof(peaks: Peaks, flops_per_byte: float) -> float:
    """Most operations per second of what does so many a byte."""
    return min(peaks.flops_per_s, flops_per_byte * peaks.bytes_per_s)


def draw(rows: Iterable[Row], peaks: Peaks, device: str) -> Figure:
    """Log-log, the roof as a line, a point per row, a colour per implementation. Needs matplotlib."""
    found = points(rows)
    intensities = sorted(x for series in found.values() for x, _ in series)
    ridge = peaks.flops_per_s / peaks.bytes_per_s
    ends = (min([*intensities, ridge]) / 2, max([*intensities, ridge]) * 2)
    figure = new_figure(8.5, 5.2, f"How near each kernel comes to what the device can do\n{device}")
    axis = figure.subplots()
    corners = (ends[0], ridge, ends[1])
    roof_label = f"roof: memory, then arithmetic ({peaks.source})"
    axis.plot(corners, [roof(peaks, x) / 1e12 for x in corners], ":", color=BOUND, linewidth=2, label=roof_label)
    for (by, series), style in zip(found.items(), compared(), strict=False):
        x, y = zip(*series, strict=True)
        axis.plot(x, [value / 1e12 for value in y], linestyle="", label=by, **style)
    axis.set(xscale="log", yscale="log", xlabel="operations per byte read or written", ylabel="TFLOP/s")
    for scale, low, high in ((axis.xaxis, ends[0], ends[1]), (axis.yaxis, *axis.get_ylim())):
        plain_ticks(scale, low, high)
    axis.grid(alpha=0.3)
    figure_legend(figure, axis, num_columns=3)
    return figure
