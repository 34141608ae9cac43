"""A pool over time as text: held, cached and free blocks per step, with hits and released blocks below.

Flow:    list of StepStats -> [pool_picture] -> lines for a terminal
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvjax.engine.requests.stats import StepStats

HELD, CACHED, FREE = "█", "▒", "·"
LEVELS = " ▁▂▃▄▅▆▇█"
LABEL_WIDTH = 11


def pool_picture(steps: Sequence[StepStats], pool_id: int, *, width: int = 72, height: int = 8) -> list[str]:
    """Lines that show pool `pool_id` over `steps`; a column is one step, or the last of several.

    Raises:
        ValueError: there are no steps, or the picture has no room.
    """
    if not steps:
        raise ValueError("expected at least one step to draw, got none")
    if width < 1 or height < 1:
        raise ValueError(f"expected width and height >= 1, got {width} and {height}")
    bins = _bins(len(steps), width)
    uses = [steps[stop - 1].pools[pool_id] for _, stop in bins]
    size = uses[0].held + uses[0].cached + uses[0].free
    columns = [_column(use.held, use.cached, size, height) for use in uses]
    lines = [f"{'blocks':>{LABEL_WIDTH}}  {HELD} held  {CACHED} cached  {FREE} free"]
    for level in reversed(range(height)):
        label = f"{size:,}" if level == height - 1 else "0" if level == 0 else ""
        lines.append(f"{label:>{LABEL_WIDTH}} ┤" + "".join(column[level] for column in columns))
    series: list[tuple[str, Callable[[StepStats], int]]] = [
        ("hit tokens", lambda step: step.num_hit_tokens),
        ("refound", lambda step: step.num_refound_tokens),
        ("released", lambda step: step.pools[pool_id].released),
        ("preempted", lambda step: step.num_preemptions),
    ]
    lines += [line for name, value in series if (line := _sparkline(name, [value(step) for step in steps], bins))]
    end = f"{len(steps):,}"
    return [*lines, f"{'step':>{LABEL_WIDTH}}  1{end:>{max(len(bins) - 1, len(end) + 1)}}"]


def _bins(num_steps: int, width: int) -> list[tuple[int, int]]:
    """At most `width` ranges of steps of nearly equal length."""
    edges = np.linspace(0, num_steps, min(num_steps, width) + 1).astype(int)
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))


def _column(held: int, cached: int, size: int, height: int) -> str:
    """`height` characters, lowest first. Anything that is there at all shows."""
    num_held = min(max(round(held * height / size), int(held > 0)), height)
    num_used = min(max(round((held + cached) * height / size), num_held + int(cached > 0)), height)
    return HELD * num_held + CACHED * (num_used - num_held) + FREE * (height - num_used)


def _sparkline(name: str, values: Sequence[int], bins: Sequence[tuple[int, int]]) -> str | None:
    """One line of sums per bin with the total behind it; None: the total is 0."""
    sums = np.array([sum(values[start:stop]) for start, stop in bins])
    if not sums.any():
        return None
    levels = np.ceil(sums * (len(LEVELS) - 1) / sums.max()).astype(int)
    return f"{name:>{LABEL_WIDTH}}  " + "".join(LEVELS[level] for level in levels) + f"  {sums.sum():,}"
