"""That a schedule was planned for the call that takes it.

Flow:    schedule of a caller, sizes of the call -> [check_planned] -> the schedule, of its own type
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar


class Planned(Protocol):
    """A schedule that says what it was planned for."""

    @property
    def sizes(self) -> Any:
        """A named tuple, of which `is_decode` says whether every sequence of the step decodes."""


Kind = TypeVar("Kind", bound=Planned)


def check_planned(op: str, schedule: Any, kind: type[Kind], sizes: Any) -> Kind:
    """`schedule`, if it is a `kind` planned for `sizes`, of a step in which all decode or not.

    Raises:
        ValueError: it is no such schedule, or was planned for others.
    """
    if not isinstance(schedule, kind):
        raise ValueError(f"{op}: expected schedule to be what plan() returns, got {type(schedule).__name__}")
    expected = sizes._replace(is_decode=schedule.sizes.is_decode)
    if schedule.sizes != expected:
        raise ValueError(
            f"{op}: expected a schedule planned for {expected}, got one for {schedule.sizes}; plan it again with "
            "this call's shapes, mask and pages"
        )
    return schedule


__all__ = ["check_planned"]
