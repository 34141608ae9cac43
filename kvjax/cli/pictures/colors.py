"""Colours by what they mean, the same in every picture.

Flow:    a meaning -> [colors] -> plots of `kvjax replay` and `kvjax generate`, of scripts

What only differs in a name (models, policies, kernels) takes `COMPARED` in turn, each with a marker of its own, so that
a print without colours can be read. Such lines share a picture with `BOUND` and with no other meaning.
"""

from __future__ import annotations

HELD = "#1f5a92"  # blocks that running requests hold, and these requests
CACHED = "#9ecae9"  # blocks that may be evicted, and are still hit
EMPTY = "#eceff3"  # blocks without contents
HIT = "#2f855a"  # prompt tokens that were found in the cache
MISSED = "#f3d9a4"  # prompt tokens that only an unlimited cache finds
EVICTED = "#c2410c"  # contents that went, and how long they had been idle
RELEASED = "#a16207"  # blocks that a sliding window gave back
WAITING = "#7e57c2"  # requests without blocks
PREEMPTED = "#b3202c"  # requests that lost their blocks
BOUND = "#5b6470"  # what nothing exceeds: an unlimited cache, who knows the trace, a device's roof

COMPARED = ("#0e8a8a", "#d6336c", "#6b8e00", "#e08600", "#4c51bf", "#7a4a21")
MARKERS = "osD^vP"

__all__ = [
    "BOUND",
    "CACHED",
    "COMPARED",
    "EMPTY",
    "EVICTED",
    "HELD",
    "HIT",
    "MARKERS",
    "MISSED",
    "PREEMPTED",
    "RELEASED",
    "WAITING",
]
