"""Units on their way to the host, which the schedulers of all data ranks share.

Flow:    TierScheduler, units that are stored -> [UnitsInTransit] -> TierScheduler, loads that wait for them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvjax.tiers.units import UnitKey, UnitWorth


class Waiting(Protocol):
    """A scheduler whose loads may wait for units in transit."""

    @property
    def num_loads(self) -> int:
        """Loads that have not ended."""

    @property
    def held_slots(self) -> list[tuple[int, list[int]]]:
        """Per load and group the slots of the host that it holds."""

    def issue_waiting(self, keys: Sequence[UnitKey]) -> None:
        """Units have left transit: loads that wait for them go on."""


class UnitsInTransit:
    """Read from a pool, not yet on the host. Belongs to the scheduler's thread."""

    def __init__(self) -> None:
        self.keys: dict[UnitKey, UnitWorth] = {}
        self.schedulers: list[Waiting] = []
        self._num_loads = 0

    @property
    def num_loads(self) -> int:
        """Loads of all schedulers that have not ended."""
        return sum(one.num_loads for one in self.schedulers)

    @property
    def held_slots(self) -> list[tuple[int, list[int]]]:
        """The held slots of all schedulers."""
        return [held for one in self.schedulers for held in one.held_slots]

    def next_load(self) -> int:
        """A number for a load that no other has."""
        self._num_loads += 1
        return self._num_loads - 1

    def issue_waiting(self, keys: Sequence[UnitKey]) -> None:
        """Units have left transit: loads of any scheduler that wait for them go on."""
        for one in self.schedulers:
            one.issue_waiting(keys)


__all__ = ["UnitsInTransit", "Waiting"]
