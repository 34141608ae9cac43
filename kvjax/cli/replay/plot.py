"""A replay as a picture: hits against an unlimited cache, the pool, the queue, and how long blocks stay.

Flow:    ReplayResult -> [draw_replay] -> matplotlib's Figure -> save_figure -> PNG, PDF or SVG
"""

from __future__ import annotations

import argparse
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvjax.cli.pictures.colors import BOUND, CACHED, EMPTY, EVICTED, HELD, HIT, MISSED, PREEMPTED, WAITING
from kvjax.cli.pictures.figures import count_ticks, legend_below, new_figure, plain_ticks
from kvjax.replay import ReplayResult
from kvjax.replay.reports.report import ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_WINDOWS = 40  # points of the hit-rate curves
MAX_BINS = 50
MINUTES = "minutes of virtual time"


def draw_replay(result: ReplayResult, what: str) -> Figure:
    """The picture of a replay of `what`, which its title names beside the hits.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure = new_figure(11, 7.6, _title(result, what))
    axes = figure.subplots(2, 2)
    minutes = np.array([sample.time_s for sample in result.recorder.samples]) / 60
    _draw_hits(axes[0, 0], result, minutes)
    _draw_pool(axes[0, 1], result, minutes)
    if result.config.serial:
        _draw_host(axes[1, 0], result)
    else:
        _draw_queue(axes[1, 0], result, minutes)
    _draw_stays(axes[1, 1], result)
    return figure


def workload_name(args: argparse.Namespace) -> str:
    """What a command line replays, for a title: the trace's file or the kind that is generated."""
    return Path(args.trace).name if args.trace else str(args.generate)


def _title(result: ReplayResult, what: str) -> str:
    recorder = result.recorder
    hits = _percent(recorder.hit_tokens, recorder.prompt_tokens)
    mode = "one request at a time" if result.config.serial else "continuous batching"
    part = "" if result.is_complete else f", interrupted after {result.num_done:,} of {result.num_requests:,} requests"
    return f"{what}: {hits} of the prompt tokens were found in the cache\n{mode}{part}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * ratio(part, whole):.1f} %"


def _series(result: ReplayResult, name: str) -> np.ndarray:  # float64[num_samples]
    return np.array([getattr(sample, name) for sample in result.recorder.samples], np.float64)


def _draw_hits(axis: Axes, result: ReplayResult, minutes: np.ndarray) -> None:
    """Hit rate within windows of equal numbers of samples, and what is lost to the bound."""
    axis.set(title="Prompt tokens found in the cache", ylabel="% of the prompt tokens", xlabel=MINUTES)
    prompt, recorder = _series(result, "prompt_tokens"), result.recorder
    edges = np.unique(np.linspace(0, max(len(prompt) - 1, 0), NUM_WINDOWS + 1).astype(int))
    asked = np.diff(prompt[edges]) if len(prompt) else np.zeros(0)
    if not (asked > 0).any():
        _say(axis, "fewer than two samples")
        return
    edges = np.concatenate((edges[:1], edges[1:][asked > 0]))  # a window without admissions has no rate
    times, asked = minutes[edges[1:]], np.diff(prompt[edges])
    bound, found = (
        100 * np.diff(_series(result, name)[edges]) / asked for name in ("infinite_hit_tokens", "hit_tokens")
    )
    overall = [
        100 * ratio(hits, recorder.prompt_tokens) for hits in (recorder.infinite_hit_tokens, recorder.hit_tokens)
    ]
    axis.plot(times, bound, ":", color=BOUND, linewidth=2, label=f"unlimited cache: {overall[0]:.1f} %")
    axis.plot(times, found, color=HIT, linewidth=2, label=f"this cache: {overall[1]:.1f} %")
    axis.fill_between(times, found, bound, where=bound > found, color=MISSED, linewidth=0, label="missed by this cache")
    axis.set_ylim(0, 105)
    legend_below(axis)


def _draw_pool(axis: Axes, result: ReplayResult, minutes: np.ndarray) -> None:
    """Blocks held, free but cached, and empty."""
    total = sum(pool.num_blocks - 1 for pool in result.plan.pools)
    held, cached = _series(result, "held_blocks"), _series(result, "cached_blocks")
    parts = [held, cached, total - held - cached]
    labels = ["held by requests", "cached, may be evicted", "empty"]
    axis.stackplot(minutes, parts, colors=[HELD, CACHED, EMPTY], labels=labels)
    title = f"What is in the pool, blocks of {result.config.block_size} tokens"
    axis.set(title=title, ylabel="blocks", xlabel=MINUTES, ylim=(0, total))
    count_ticks(axis.yaxis)
    axis.margins(x=0)
    legend_below(axis)


def _draw_queue(axis: Axes, result: ReplayResult, minutes: np.ndarray) -> None:
    """Running and waiting requests, and preemptions so far if there are any."""
    axis.plot(minutes, _series(result, "running"), color=HELD, label="running")
    axis.plot(minutes, _series(result, "waiting"), color=WAITING, label="waiting")
    preempted = minutes[np.flatnonzero(np.diff(_series(result, "preemptions"), prepend=0))]
    for number, minute in enumerate(preempted):
        label = f"preempted: {result.recorder.preemptions:,}" if not number else None
        axis.axvline(minute, color=PREEMPTED, linewidth=1, linestyle=":", zorder=0, label=label)
    axis.set(title="Requests at once", ylabel="requests", xlabel=MINUTES, ylim=(0, None))
    count_ticks(axis.yaxis)
    legend_below(axis)


def _draw_host(axis: Axes, result: ReplayResult) -> None:
    """Distribution of the managers' time per request."""
    us = np.array(result.recorder.host_ns) / 1e3
    axis.set(title="CPU time of the managers", ylabel="requests", xlabel="microseconds a request")
    axis.hist(us, bins=_bins(axis, us), color=HELD, label=f"median {np.median(us):,.0f} us")
    count_ticks(axis.yaxis)
    legend_below(axis)


def _draw_stays(axis: Axes, result: ReplayResult) -> None:
    """How long sampled blocks kept their contents, and idled before they lost them."""
    axis.set(title="How long evicted blocks had kept their contents", ylabel="sampled blocks")
    axis.set_xlabel("seconds of virtual time")
    stayed = np.array([event.lifetime_seconds for event in result.residencies])
    idle = np.array([event.idle_seconds for event in result.residencies])
    if not (stayed > 0).any():
        _say(axis, "no sampled block was evicted")
        return
    bins = _bins(axis, np.concatenate((stayed, idle)))
    axis.hist(stayed, bins=bins, color=CACHED, label="since they were written")
    axis.hist(idle, bins=bins, histtype="step", color=EVICTED, linewidth=2, label="since they were last used")
    count_ticks(axis.yaxis)
    legend_below(axis)


def _say(axis: Axes, text: str) -> None:
    """Words in place of data."""
    axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes)
    axis.set(xticks=[], yticks=[])


def _bins(axis: Axes, values: np.ndarray) -> list[float]:
    """Edges over the positive values, fewer for few; logarithmic where they span more than a decade and a half."""
    positive = values[values > 0]
    low, high = float(positive.min()), max(float(positive.max()), 1.01 * float(positive.min()))
    num_edges = min(MAX_BINS, 2 + isqrt(len(values)))
    if high < 30 * low:
        return np.linspace(low, high, num_edges).tolist()
    axis.set_xscale("log")
    plain_ticks(axis.xaxis, low, high)
    return np.geomspace(low, high, num_edges).tolist()


__all__ = ["draw_replay", "workload_name"]
