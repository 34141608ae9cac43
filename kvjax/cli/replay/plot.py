"""A replay as a picture: hits against the infinite cache, the pool, the queue, and how long blocks stay.

Flow:    ReplayResult -> [plot_replay] -> PNG, PDF or SVG
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.cli.running.output_files import require_matplotlib, writing
from kvjax.replay import ReplayResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HELD, CACHED, FREE = "#2b6cb0", "#90cdf4", "#edf2f7"
HIT, CEILING, WARN = "#2f855a", "#a0aec0", "#c05621"
NUM_WINDOWS = 60  # points of the hit-rate curves
NUM_BINS = 50


def plot_replay(result: ReplayResult, path: Path, title: str) -> None:
    """Writes the picture.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    require_matplotlib("--plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    minutes = np.array([sample.time_s for sample in result.recorder.samples]) / 60
    _plot_hits(axes[0, 0], result, minutes)
    _plot_pool(axes[0, 1], result, minutes)
    if result.config.serial:
        _plot_host(axes[1, 0], result)
    else:
        _plot_queue(axes[1, 0], result, minutes)
    _plot_residency(axes[1, 1], result)
    mode = "one request at a time" if result.config.serial else "continuous batching"
    part = "" if result.is_complete else f" (interrupted after {result.num_done:,} of {result.num_requests:,} requests)"
    figure.suptitle(f"{title}: {mode}, blocks of {result.config.block_size} tokens{part}")
    with writing(path):
        figure.savefig(path)


def _series(result: ReplayResult, name: str) -> np.ndarray:
    return np.array([getattr(sample, name) for sample in result.recorder.samples], np.float64)


def _plot_hits(axis: Axes, result: ReplayResult, minutes: np.ndarray) -> None:
    """Hit rate within windows of equal numbers of samples."""
    axis.set(title="prompt tokens found in the cache", ylabel="%", xlabel="virtual minutes")
    if len(minutes) < 2:
        _say(axis, "fewer than two samples")
        return
    prompt, recorder = _series(result, "prompt_tokens"), result.recorder
    edges = np.unique(np.linspace(0, len(prompt) - 1, NUM_WINDOWS + 1).astype(int))
    asked = np.diff(prompt[edges])
    edges = np.concatenate((edges[:1], edges[1:][asked > 0]))  # a window without admissions has no rate
    for name, color, label, total in (
        ("infinite_hit_tokens", CEILING, "infinite cache", recorder.infinite_hit_tokens),
        ("hit_tokens", HIT, "this cache", recorder.hit_tokens),
    ):
        hits = _series(result, name)
        rate = 100 * np.diff(hits[edges]) / np.diff(prompt[edges])
        overall = 100 * total / max(recorder.prompt_tokens, 1)
        axis.plot(minutes[edges[1:]], rate, color=color, label=f"{label}: {overall:.1f} % overall")
    axis.set_ylim(bottom=0)
    _legend_below(axis)


def _plot_pool(axis: Axes, result: ReplayResult, minutes: np.ndarray) -> None:
    """Blocks held, free but cached, and empty."""
    total = sum(pool.num_blocks - 1 for pool in result.plan.pools)
    held, cached = _series(result, "held_blocks"), _series(result, "cached_blocks")
    parts = [held, cached, total - held - cached]
    labels = ["held by requests", "free, still cached", "free, empty"]
    axis.stackplot(minutes, parts, colors=[HELD, CACHED, FREE], labels=labels)
    axis.set(title=f"the pool of {total:,} blocks", ylabel="blocks", xlabel="virtual minutes", ylim=(0, total))
    _count_ticks(axis)
    axis.margins(x=0)
    _legend_below(axis)


def _plot_queue(axis: Axes, result: ReplayResult, minutes: np.ndarray) -> None:
    """Running and waiting requests, and preemptions so far if there are any."""
    lines = axis.plot(minutes, _series(result, "running"), color=HELD, label="running")
    lines += axis.plot(minutes, _series(result, "waiting"), color=CEILING, label="waiting")
    axis.set(title="requests", ylabel="requests", xlabel="virtual minutes", ylim=(0, None))
    _count_ticks(axis)
    if result.recorder.preemptions:
        other = axis.twinx()
        lines += other.plot(minutes, _series(result, "preemptions"), color=WARN, label="preemptions so far (right)")
        other.set(ylabel="preemptions", ylim=(0, 1.05 * result.recorder.preemptions))
        _count_ticks(other)
    _legend_below(axis, handles=lines)


def _plot_host(axis: Axes, result: ReplayResult) -> None:
    """Distribution of the managers' time per request."""
    us = np.array(result.recorder.host_ns) / 1e3
    axis.set(title="host time of the managers", ylabel="requests", xlabel="us a request")
    axis.hist(us, bins=_bins(axis, us), color=HELD)
    axis.axvline(float(np.median(us)), color=WARN, label=f"median {np.median(us):,.0f} us")
    _count_ticks(axis)
    _legend_below(axis)


def _plot_residency(axis: Axes, result: ReplayResult) -> None:
    """How long sampled blocks kept their contents, and idled before they lost them."""
    axis.set(title="sampled blocks when their contents went", ylabel="blocks", xlabel="virtual seconds")
    lifetimes = np.array([event.lifetime_seconds for event in result.residencies])
    idle = np.array([event.idle_seconds for event in result.residencies])
    if not (lifetimes > 0).any():
        _say(axis, "no sampled block was evicted")
        return
    bins = _bins(axis, np.concatenate((lifetimes, idle)))
    axis.hist(lifetimes, bins=bins, color=CACHED, label="lifetime")
    axis.hist(idle, bins=bins, histtype="step", color=WARN, linewidth=1.5, label="idle before eviction")
    _count_ticks(axis)
    _legend_below(axis)


def _legend_below(axis: Axes, **what: Any) -> None:
    """A legend in one row below the axis, where it hides no curve."""
    axis.legend(**what, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=3, frameon=False)


def _say(axis: Axes, text: str) -> None:
    axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes)


def _bins(axis: Axes, values: np.ndarray) -> list[float]:
    """Edges over the positive values; with a logarithmic axis where they span more than a decade and a half."""
    positive = values[values > 0]
    low, high = float(positive.min()), max(float(positive.max()), 1.01 * float(positive.min()))
    if high < 30 * low:
        return np.linspace(low, high, NUM_BINS).tolist()
    axis.set_xscale("log")
    return np.geomspace(low, high, NUM_BINS).tolist()


def _count_ticks(axis: Axes) -> None:
    """Whole numbers at the y axis, thousands grouped."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axis.yaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
