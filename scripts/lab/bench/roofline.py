"""The roofline plot: what was reached next to what the device allows.

Flow:    rows with times, Peaks -> [plot] -> PNG
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from scripts.lab.bench.report import Peaks, Row

COLORS = ("#2b6cb0", "#a0aec0", "#c05621", "#2f855a", "#6b46c1", "#b83280")


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


def plot(path: Path, rows: Iterable[Row], peaks: Peaks, title: str) -> None:
    """Log-log, the roof as a line, a point per row, a colour per implementation. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = points(rows)
    intensities = sorted(x for series in found.values() for x, _ in series)
    ridge = peaks.flops_per_s / peaks.bytes_per_s
    ends = (min([*intensities, ridge]) / 2, max([*intensities, ridge]) * 2)
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    corners = (ends[0], ridge, ends[1])
    axis.plot(corners, [roof(peaks, x) / 1e12 for x in corners], color="#4a5568", label=peaks.source)
    for i, (by, series) in enumerate(found.items()):
        x, y = zip(*series, strict=True)
        axis.plot(x, [value / 1e12 for value in y], "o", markersize=5, color=COLORS[i % len(COLORS)], label=by)
    axis.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s", title=title)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, format="png")
