"""What a shared tier asks of a store: values under names, no more.

Flow:    SharedStore, on its loop -> [Backend] -> ObjectBackend (obstore) or RedisBackend (redis)

Whatever a call raises means that the store did not do it. A call may be cancelled at any moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

Value: TypeAlias = Any  # bytes, or anything with the buffer protocol


class Backend(Protocol):
    """One store. All calls come from one event loop, several at a time."""

    async def have(self, names: Sequence[str]) -> list[bool]:
        """Whether there is a value, for each name."""

    async def get(self, names: Sequence[str]) -> list[Value | None]:
        """The value of each name; None: there is none."""

    async def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Writes values, in place of those that are there."""

    async def delete(self, names: Sequence[str]) -> None:
        """Deletes values, if they are there."""

    async def close(self) -> None:
        """Ends its connections."""


def told(problem: object) -> str:
    """What went wrong, in one line: clients tell more than anybody wants to read."""
    return str(problem).strip().partition("\n")[0] or type(problem).__name__


__all__ = ["Backend", "Value", "told"]
