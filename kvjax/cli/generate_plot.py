"""The pools over a run as a PNG: held, cached and free blocks per step, hits and blocks given back below.

Flow:    list of StepStats -> [save_pool_plot] -> PNG file
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvjax.engine.stats import StepStats

HELD, CACHED, FREE, HITS, RELEASED, PREEMPTED = "#31688e", "#90c8ac", "#e8e8e8", "#31688e", "#c96f2b", "#b02a37"


def save_pool_plot(steps: Sequence[StepStats], path: Path) -> None:
    """Draws `steps` into a PNG at `path`, a panel per pool and one for events. Needs matplotlib."""
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    num_pools = len(steps[0].pools)
    figure = Figure(figsize=(10, 2.6 * num_pools + 2.2), layout="constrained")
    axes = figure.subplots(num_pools + 1, 1, sharex=True, height_ratios=[2.6] * num_pools + [1.6])
    numbers = [step.step for step in steps]
    for pool_id in range(num_pools):
        uses = [step.pools[pool_id] for step in steps]
        stacks = [[use.held for use in uses], [use.cached for use in uses], [use.free for use in uses]]
        labels = ["held by requests", "cached, free to evict", "free"]
        axes[pool_id].stackplot(numbers, stacks, labels=labels, colors=[HELD, CACHED, FREE], step="mid")
        axes[pool_id].set_ylabel("blocks" if num_pools == 1 else f"blocks of pool {pool_id}")
        axes[pool_id].margins(0)
    axes[0].legend(loc="upper center", bbox_to_anchor=(0.5, 1.18), ncols=3, frameon=False)
    events = axes[-1]
    events.bar(numbers, [step.num_hit_tokens for step in steps], color=HITS, width=1.0, label="prompt tokens found")
    events.set_ylabel("tokens found")
    events.set_xlabel("step")
    blocks = events.twinx()
    released = [sum(pool.released for pool in step.pools) for step in steps]
    blocks.plot(numbers, released, color=RELEASED, lw=0.9, label="blocks out of the window (right)")
    for step in steps:
        if step.num_preemptions:
            blocks.axvline(step.step, color=PREEMPTED, lw=0.8, ls=":")
    blocks.set_ylim(bottom=0)
    handles = [*events.get_legend_handles_labels()[0], *blocks.get_legend_handles_labels()[0]]
    events.legend(handles=handles, loc="upper right", frameon=False)
    figure.savefig(path, format="png", dpi=120)
