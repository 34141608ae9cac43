"""The pools over a run as a picture: held, cached and free blocks per step, hits and released blocks below.

Flow:    list of StepStats -> [save_pool_plot] -> PNG, PDF or SVG
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax.cli.running.output_files import writing
from kvjax.engine.requests.stats import StepStats

HELD, CACHED, FREE, RELEASED, PREEMPTED = "#31688e", "#90c8ac", "#ebebeb", "#c96f2b", "#b02a37"


def save_pool_plot(steps: Sequence[StepStats], path: Path) -> None:
    """Draws `steps` into a file at `path`: a panel per pool, then hits, then released blocks. Needs matplotlib."""
    from matplotlib.figure import Figure  # no pyplot: no global state, no display
    from matplotlib.ticker import MaxNLocator

    num_pools = len(steps[0].pools)
    figure = Figure(figsize=(10, 2.8 * num_pools + 3.2), layout="constrained")
    axes = figure.subplots(num_pools + 2, 1, sharex=True, height_ratios=[2.8] * num_pools + [1.2, 1.2])
    numbers = [step.step for step in steps]
    for pool_id in range(num_pools):
        _draw_pool(axes[pool_id], numbers, steps, pool_id)
    axes[0].legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    hits, released = axes[-2:]
    hits.set_ylabel("prompt tokens\nfound cached")
    released.set_ylabel("blocks out of\nthe window")
    for axis, counts, color in (
        (hits, [step.num_hit_tokens for step in steps], HELD),
        (released, [sum(pool.released for pool in step.pools) for step in steps], RELEASED),
    ):
        axis.bar(numbers, counts, color=color, width=1.0)
        axis.set_ylim(0, 1.05 * max(1, *counts))
        axis.yaxis.set_major_locator(MaxNLocator(4, integer=True, steps=[1, 2, 5, 10]))
    released.set_xlabel("step (dotted: a request was preempted)")
    for step in steps:
        for axis in axes if step.num_preemptions else ():
            axis.axvline(step.step, color=PREEMPTED, lw=0.8, ls=":")
    released.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    released.set_xlim(0.5, numbers[-1] + 0.5)
    with writing(path):
        figure.savefig(path, dpi=120)


def _draw_pool(axis: Any, numbers: Sequence[int], steps: Sequence[StepStats], pool_id: int) -> None:
    uses = [step.pools[pool_id] for step in steps]
    bottom = [0] * len(uses)
    for label, color, name in (
        ("held by requests", HELD, "held"),
        ("cached, free to evict", CACHED, "cached"),
        ("free", FREE, "free"),
    ):
        heights = [getattr(use, name) for use in uses]
        axis.bar(numbers, heights, bottom=bottom, color=color, width=1.0, label=label)
        bottom = [base + height for base, height in zip(bottom, heights, strict=True)]
    axis.set_ylim(0, max(bottom))
    axis.set_ylabel("blocks" if len(steps[0].pools) == 1 else f"blocks of pool {pool_id}")
