"""How far a replay went, and how long it took.

Flow:    run_replay, run_fleet, run_split -> [ReplayExtent], the base of their results -> reports
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ReplayExtent:
    """Requests and seconds."""

    num_requests: int  # of the trace
    num_done: int  # of them, those that ended or were refused
    virtual_seconds: float
    wall_seconds: float

    @property
    def is_complete(self) -> bool:
        """Whether the replay went to the trace's end; else it was stopped between two steps."""
        return self.num_done == self.num_requests


__all__ = ["ReplayExtent"]
