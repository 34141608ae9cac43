"""Virtual time: seconds that the simulator advances and that residency metrics read.

Flow:    simulators -> [VirtualClock] -> KVCacheMetricsCollector
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class VirtualClock:
    """Seconds since the start of the trace."""

    now_s: float = 0.0

    def now_ns(self) -> int:
        """The time as `time.monotonic_ns` gives it."""
        return int(self.now_s * 1e9)
