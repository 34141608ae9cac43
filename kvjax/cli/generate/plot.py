"""The pools over a run as a picture: held, cached and empty blocks per step, hits and released blocks below.

Flow:    list of StepStats -> [title_of, draw_pools] -> matplotlib's Figure -> save_figure -> PNG, PDF or SVG
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvjax.cli.pictures.colors import CACHED, EMPTY, HELD, HIT, PREEMPTED, RELEASED
from kvjax.cli.pictures.figures import count_ticks, figure_legend, new_figure
from kvjax.engine.requests.stats import StepStats
from kvjax.text import count_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PARTS = (("held by requests", HELD, "held"), ("cached, may be evicted", CACHED, "cached"), ("empty", EMPTY, "free"))


def title_of(num_requests: int, token_hit_rate: float, num_aborted: int) -> str:
    """A run's title: requests, what was found, and whether an interrupt came."""
    found = f"{100 * token_hit_rate:.0f} % of the prompt tokens were found in the cache"
    done = f"\ninterrupted after {num_requests - num_aborted:,} of {num_requests:,}" if num_aborted else ""
    return f"{count_of(num_requests, 'request')}: {found}{done}"


def draw_pools(steps: Sequence[StepStats], title: str) -> Figure:
    """A panel per pool, one of hits, and one of released blocks where a window gave any back.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    num_pools = len(steps[0].pools)
    numbers = [step.step for step in steps]
    counts = {"Prompt tokens found in the cache": ("tokens", HIT, [step.num_hit_tokens for step in steps])}
    released = [sum(pool.released for pool in step.pools) for step in steps]
    if any(released):
        counts["Blocks that left a sliding window"] = ("blocks", RELEASED, released)
    heights = [2.6] * num_pools + [1.1] * len(counts)
    figure = new_figure(10, sum(heights) + 1.6, title)
    axes = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0])
    for pool_id, axis in enumerate(axes[:num_pools]):
        _draw_pool(axis, numbers, steps, pool_id)
    for axis, (name, (unit, color, values)) in zip(axes[num_pools:], counts.items(), strict=True):
        axis.bar(numbers, values, color=color, width=1.0)
        axis.set_title(name, fontsize=10, loc="left")
        axis.set(ylabel=unit, ylim=(0, 1.05 * max(1, *values)))
        count_ticks(axis.yaxis, num_ticks=3)
    _mark_preemptions(axes, steps)
    axes[-1].set(xlabel="step of the engine, one batch each", xlim=(0.5, numbers[-1] + 0.5))
    count_ticks(axes[-1].xaxis, num_ticks=10)
    figure_legend(figure, axes[0])
    return figure


def _draw_pool(axis: Axes, numbers: Sequence[int], steps: Sequence[StepStats], pool_id: int) -> None:
    uses = [step.pools[pool_id] for step in steps]
    bottom = [0] * len(uses)
    for label, color, name in PARTS:
        heights = [getattr(use, name) for use in uses]
        axis.bar(numbers, heights, bottom=bottom, color=color, width=1.0, label=label)
        bottom = [base + height for base, height in zip(bottom, heights, strict=True)]
    name = "the pool" if len(steps[0].pools) == 1 else f"pool {pool_id}"
    axis.set_title(f"What is in the {max(bottom):,} blocks of {name}", fontsize=10, loc="left")
    axis.set(ylabel="blocks", ylim=(0, max(bottom)))
    count_ticks(axis.yaxis)


def _mark_preemptions(axes: Sequence[Axes], steps: Sequence[StepStats]) -> None:
    """A dotted line through all panels at every step that preempted a request."""
    numbers = [step.step for step in steps if step.num_preemptions]
    for axis in axes:
        for i, number in enumerate(numbers):
            label = "a request was preempted" if not i else None
            axis.axvline(number, color=PREEMPTED, linewidth=0.8, linestyle=":", label=label)


__all__ = ["draw_pools", "title_of"]
